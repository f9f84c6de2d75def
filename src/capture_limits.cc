#include "capture_limits.h"

#include <algorithm>

#include "plait/error.h"

namespace plait {

void CaptureLimits::note(long long q_rows, long long cache_blocks) {
  q_rows_ = std::min(q_rows_, q_rows);
  cache_blocks_ = std::min(cache_blocks_, cache_blocks);
}

void CaptureLimits::check_plan(const FormatView& view, bool ragged) const {
  constexpr const char* kRemedy =
      ", and a replay of it would read beyond; use another Attention for such plans";
  check(view.num_query_tokens <= q_rows_, "plan: ", view.num_query_tokens,
        " query tokens, but a captured run() has ", q_rows_, " rows of q", kRemedy);
  check(view.max_block < cache_blocks_, "plan: ", view.max_block_place, " is ", view.max_block,
        ", but a captured run() has ", cache_blocks_, ragged ? " rows of k" : " pages of cache",
        kRemedy);
}

}  // namespace plait
