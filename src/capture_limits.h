// What captured runs of an Attention can serve. A replay checks nothing: it reads the q and the
// cache that it was captured with, and the plan that is current then. So plan() refuses what would
// make one of them read out of bounds.
#pragma once
#include <climits>

#include "formats/view.h"

namespace plait {

class CaptureLimits {
 public:
  // A run() was captured: rows of its q, and pages (ragged: rows) of its cache.
  void note(long long q_rows, long long cache_blocks);
  // Throws ArgumentError if `view` has more query tokens than the smallest q captured has rows, or
  // if its host tables name a block beyond the smallest cache captured.
  void check_plan(const FormatView& view, bool ragged) const;

 private:
  long long q_rows_ = LLONG_MAX, cache_blocks_ = LLONG_MAX;
};

}  // namespace plait
