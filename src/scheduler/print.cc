// A plan as a table of a few lines: the batch, the candidates (the chosen one starred), what the
// CTAs get and what they draw, what is merged.
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "plait/plan.h"

namespace plait {
namespace {

std::string visibility_name(const Visibility& v) {
  std::ostringstream text;
  text << (v.causal ? "causal" : "full");
  if (v.window_left >= 0) text << ", window " << v.window_left;
  if (v.window_left >= 0 && v.sink_tokens > 0) text << " + " << v.sink_tokens << " sink tokens";
  return text.str();
}

}  // namespace

std::string to_string(const Plan& plan) {
  std::ostringstream text;
  text << std::fixed << "Plan: " << plan.num_tokens << " query tokens, " << plan.num_requests
       << " requests, " << plan.total_keys << " keys, " << plan.num_levels
       << (plan.num_levels == 1 ? " level, " : " levels, ") << visibility_name(plan.visible)
       << ", costs " << plan.cost_model
       << "\n    candidate        chunk    items  partial rows  makespan us  balance\n";
  for (size_t i = 0; i < plan.candidates.size(); ++i) {
    const PlanCandidate& c = plan.candidates[i];
    text << (static_cast<int>(i) == plan.chosen ? "  * " : "    ") << std::left << std::setw(13)
         << c.name << std::right << std::setw(9);
    if (c.chunk > 0) {
      text << c.chunk;
    } else {
      text << '-';
    }
    if (c.fits) {
      text << std::setw(9) << c.num_items << std::setw(14) << c.num_partial_rows << std::setw(13)
           << std::setprecision(1) << c.makespan_us << std::setw(9) << std::setprecision(3)
           << c.balance << '\n';
    } else {
      text << std::setw(9) << '-' << std::setw(14) << c.num_partial_rows
           << "  dropped: more partial rows than the workspace has\n";
    }
  }
  int busy = 0, most = 0;
  for (int cta = 0; cta + 1 < static_cast<int>(plan.cta_item_indptr.size()); ++cta) {
    const int items = plan.cta_item_indptr[cta + 1] - plan.cta_item_indptr[cta];
    busy += items > 0;
    most = std::max(most, items);
  }
  int merged_tokens = 0;
  if (const std::vector<int>& indptr = plan.merge_indptr; !indptr.empty()) {
    const size_t lists = (indptr.size() - 1) / plan.num_tokens;  // of a token
    for (size_t i = 0; i + 1 < indptr.size(); i += lists) {
      merged_tokens += indptr[i + lists] > indptr[i];
    }
  }
  text << "  " << plan.items.size() << " items on " << busy << " of " << plan.num_ctas
       << " CTAs, at most " << most << " each";
  if (const int queued = plan.num_queued(); queued > 0) text << ", " << queued << " in the queue";
  text << "; " << merged_tokens << " tokens merged from " << plan.merge_sources.size()
       << " sources, " << plan.num_partial_rows << " partial rows\n";
  return text.str();
}

}  // namespace plait
