// The one mask predicate, and what follows from it for a tile: the keys that any of its rows can
// see, and whether a tile is skipped, needs the mask, or does not. (Custom mask bits, which hide
// more of what is visible here, are in mask_bits.h.) Used by the planner (cost and
// cuts), the kernels and the CPU backend. Positions are absolute; lists start at kv_pos_begin.
#pragma once
#include "host_device/base.h"

namespace plait {

// The keys one query sees, as positions: begin <= k < end, and sinks below `begin`.
struct VisibleRange {
  int begin, end, sink_end;
};
PLAIT_HD VisibleRange visible_range(const Visibility& v, int q_pos) {
  return {v.window_left < 0 ? kMinInt : q_pos - v.window_left, v.causal ? q_pos + 1 : kMaxInt,
          v.sink_tokens};
}
PLAIT_HD bool visible(const VisibleRange& range, int k_pos) {  // & and |: no branch an element
  return (k_pos < range.end) & ((k_pos >= range.begin) | (k_pos < range.sink_end));
}
PLAIT_HD bool visible(const Visibility& v, int q_pos, int k_pos) {
  return visible(visible_range(v, q_pos), k_pos);
}

struct KeyRange {
  int begin, end;
};

// The smallest range of list positions that holds every key some query at a position in
// [min_position, max_position] sees; begin == end if there is none. With sink tokens the range
// starts at them and spans the hidden middle, which the tiles then skip.
PLAIT_HD KeyRange visible_keys(const Visibility& v, int min_position, int max_position,
                               int kv_pos_begin, int kv_len) {
  int begin = 0, end = kv_len;
  if (v.causal) end = min(end, max(max_position + 1 - kv_pos_begin, 0));
  if (v.window_left >= 0 && kv_pos_begin >= v.sink_tokens) {
    begin = max(begin, min_position - v.window_left - kv_pos_begin);
  }
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

enum class TileVisibility { kSkip, kPartial, kFull };

// Of keys at positions [k_first, k_last] and queries at positions [min_position, max_position]:
// kSkip if no pair is visible, kFull if all are. mask_begin: the first key that custom mask bits
// cover for any of the queries (WorkItem::mask_begin).
PLAIT_HD TileVisibility tile_visibility(const Visibility& v, int min_position, int max_position,
                                        int k_first, int k_last, int mask_begin) {
  const bool none_causal = v.causal && k_first > max_position;
  const bool none_window =
      v.window_left >= 0 && k_last < min_position - v.window_left && k_first >= v.sink_tokens;
  if (none_causal || none_window) return TileVisibility::kSkip;
  const bool all_causal = !v.causal || k_last <= min_position;
  const bool all_window =
      v.window_left < 0 || k_first >= max_position - v.window_left || k_last < v.sink_tokens;
  const bool all_bits = k_last < mask_begin;
  return all_causal && all_window && all_bits ? TileVisibility::kFull : TileVisibility::kPartial;
}

}  // namespace plait
