// explain: what a plan shares between requests and why, as a table and as JSON.
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "plait/plan.h"

namespace plait {
namespace {

const char* why_text(int why) {
  switch (why) {
    case NodeChoice::kPays:
      return "reading once saves more than joining costs";
    case NodeChoice::kDoesNotPay:
      return "joining costs more than reading once saves";
    case NodeChoice::kTooDeep:
      return "pays, but other nodes of its path pay more and levels are few";
    case NodeChoice::kCannotJoin:
      return "its keys end inside a page or not in front of those below it";
    case NodeChoice::kInsideChunk:
      return "no chunk of invariant mode ends in it";
    default:
      return "levels as given, not weighed";
  }
}
const char* why_name(int why) {
  constexpr const char* kNames[] = {"pays",        "does_not_pay", "too_deep",
                                    "cannot_join", "given",        "inside_chunk"};
  return kNames[std::clamp(why, 0, static_cast<int>(NodeChoice::kInsideChunk))];
}

// Bytes that the requests' lists have together, and those that are not read of them.
struct Totals {
  long long all, not_read;
  int num_shared;
};
Totals totals_of(const Plan& plan, const std::vector<NodeChoice>& nodes) {
  Totals totals{plan.total_keys * plan.kv_bytes, 0, 0};
  for (const NodeChoice& node : nodes) {
    totals.not_read += node.keys_not_read * plan.kv_bytes;
    totals.num_shared += node.level >= 0;
  }
  return totals;
}

}  // namespace

std::vector<NodeChoice> shared_nodes(const Plan& plan) {
  if (!plan.nodes.empty() || plan.num_levels == 1) return plan.nodes;
  std::vector<NodeChoice> nodes;
  for (int b = 0; b < static_cast<int>(plan.row_blocks.size()); ++b) {
    const RowBlock& block = plan.row_blocks[b];
    if (block.num_tokens == 0) continue;
    const auto request = [&](int i) {
      const int entry = block.first_token + i;
      return plan.token_request[plan.row_map.empty() ? entry : plan.row_map[entry]];
    };
    NodeChoice node{.num_requests = 1};
    for (int i = 1; i < block.num_tokens; ++i) node.num_requests += request(i) != request(i - 1);
    if (node.num_requests < 2) continue;
    node.node = b;
    node.level = block.level;
    node.kv_len = block.kv_len;
    node.why = NodeChoice::kGiven;
    node.keys_shared = block.kv_len;
    node.keys_not_read = (node.num_requests - 1LL) * block.kv_len;
    std::vector<int> first_rows;
    for (const WorkItem& item : plan.items) {
      if (item.row_block != b) continue;
      if (std::find(first_rows.begin(), first_rows.end(), item.first_row) != first_rows.end()) {
        continue;
      }
      first_rows.push_back(item.first_row);
      node.num_rows += item.num_rows;
      node.tile_q = std::max(node.tile_q, item.num_rows);
    }
    node.num_tiles = static_cast<int>(first_rows.size());
    nodes.push_back(node);
  }
  return nodes;
}

std::string explain(const Plan& plan) {
  const std::vector<NodeChoice> nodes = shared_nodes(plan);
  const Totals totals = totals_of(plan, nodes);
  std::ostringstream text;
  text << std::fixed << std::setprecision(1);
  const auto megabytes = [&](long long bytes) { return static_cast<double>(bytes) * 1e-6; };
  text << "Shared: " << totals.num_shared << " of " << nodes.size() << " nodes over several "
       << "requests; " << megabytes(totals.not_read) << " of " << megabytes(totals.all)
       << " MB of keys and values not read; costs " << plan.cost_model << '\n';
  if (nodes.empty()) return text.str();
  text << "    node  parent   level     keys  requests     rows      tiles    MB shared  "
          "MB not read   shared us     flat us  why\n";
  for (const NodeChoice& node : nodes) {
    text << std::setw(8) << node.node << std::setw(8);
    if (node.parent >= 0) {
      text << node.parent;
    } else {
      text << '-';
    }
    text << std::setw(8);
    if (node.level >= 0) {
      text << node.level;
    } else {
      text << "flat";
    }
    std::ostringstream tiles;
    tiles << node.num_tiles << " x " << node.tile_q;
    text << std::setw(9) << node.kv_len << std::setw(10) << node.num_requests << std::setw(9)
         << node.num_rows << std::setw(11) << tiles.str() << std::setw(13)
         << megabytes(node.keys_shared * plan.kv_bytes) << std::setw(13)
         << megabytes(node.keys_not_read * plan.kv_bytes) << std::setw(12)
         << static_cast<double>(node.shared_ns) * 1e-3 << std::setw(12)
         << static_cast<double>(node.flat_ns) * 1e-3 << "  " << why_text(node.why) << '\n';
  }
  return text.str();
}

std::string explain_json(const Plan& plan) {
  const std::vector<NodeChoice> nodes = shared_nodes(plan);
  const Totals totals = totals_of(plan, nodes);
  std::ostringstream text;
  text << "{\"kv_bytes\": " << plan.kv_bytes << ", \"bytes\": " << totals.all
       << ", \"bytes_not_read\": " << totals.not_read << ", \"cost_model\": \"" << plan.cost_model
       << "\", \"nodes\": [";
  const char* separator = "";
  for (const NodeChoice& node : nodes) {
    text << separator << "{\"node\": " << node.node << ", \"parent\": " << node.parent
         << ", \"shared\": " << (node.level >= 0 ? "true" : "false")
         << ", \"level\": " << node.level << ", \"keys\": " << node.kv_len
         << ", \"requests\": " << node.num_requests << ", \"rows\": " << node.num_rows
         << ", \"tiles\": " << node.num_tiles << ", \"tile_q\": " << node.tile_q
         << ", \"bytes_shared\": " << node.keys_shared * plan.kv_bytes
         << ", \"bytes_not_read\": " << node.keys_not_read * plan.kv_bytes
         << ", \"shared_us\": " << static_cast<double>(node.shared_ns) * 1e-3
         << ", \"flat_us\": " << static_cast<double>(node.flat_ns) * 1e-3 << ", \"why\": \""
         << why_name(node.why) << "\"}";
    separator = ", ";
  }
  text << "]}";
  return text.str();
}

}  // namespace plait
