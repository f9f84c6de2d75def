// The KV tiles that a work item visits and which of them need no mask: how every tiled kernel walks
// its keys.
#pragma once
#include "host_device/config.h"
#include "host_device/visibility.h"

namespace plait {

// The kv tiles that an item visits, in order: [first, first + count) and, behind the hidden middle
// of a window with sink tokens, [second, second + second_count). Tile t holds list positions
// tile_0 + t * tile_kv ...; kv_pos_begin is that of tile 0.
struct TileList {
  int first, count, second, second_count;
  PLAIT_HD int size() const { return count + second_count; }
  PLAIT_HD int operator[](int j) const { return j < count ? first + j : second + (j - count); }
};
PLAIT_HD TileList tiles_of(const WorkItem& item, const Visibility& v, int kv_pos_begin, int tile_kv,
                           int tile_0 = 0) {
  const int begin = (item.kv_begin - tile_0) / tile_kv;
  const int end = ceil_div(item.kv_end - tile_0, tile_kv);
  if (v.window_left < 0 || v.sink_tokens <= kv_pos_begin || item.kv_begin >= item.kv_end) {
    return {begin, max(end - begin, 0), 0, 0};
  }
  const int sink_end = ceil_div(v.sink_tokens - kv_pos_begin, tile_kv);
  const int window_begin = max(item.min_position - v.window_left - kv_pos_begin, 0) / tile_kv;
  const int first_end = min(max(sink_end, begin), end);
  const int second_begin = min(max(window_begin, first_end), end);
  return {begin, first_end - begin, second_begin, end - second_begin};
}

// Invariant mode: the item's keys in chunk `chunk` of its list, without the tiles before a window,
// which an item of whole chunks may begin with. Its chunks are tiles_of() with chunk_keys as
// tile_kv.
PLAIT_HD WorkItem chunk_of(const WorkItem& item, const Visibility& v, int kv_pos_begin, int chunk,
                           int chunk_keys, int tile_kv) {
  WorkItem part = item;
  part.kv_begin = max(item.kv_begin, chunk * chunk_keys);
  part.kv_end = min(item.kv_end, (chunk + 1) * chunk_keys);
  if (v.window_left >= 0 && v.sink_tokens <= kv_pos_begin) {
    const int window_begin = item.min_position - v.window_left - kv_pos_begin;
    part.kv_begin = min(max(part.kv_begin, window_begin / tile_kv * tile_kv), part.kv_end);
  }
  return part;
}

// Tiles begin <= t < end that need no mask: every row sees every key of them. Tiles of sink tokens
// and those that custom mask bits cover are left to the mask.
struct FullTiles {
  int begin, end;
};
PLAIT_HD FullTiles full_tiles_of(const WorkItem& item, const Visibility& v, int kv_pos_begin,
                                 int tile_kv, int tile_0 = 0) {
  int begin = 0, end = item.kv_end - tile_0;
  if (v.causal) end = min(end, item.min_position + 1 - kv_pos_begin);
  if (v.window_left >= 0) begin = max(item.max_position - v.window_left - kv_pos_begin, 0);
  end = min(end, item.mask_begin < kv_pos_begin ? 0 : item.mask_begin - kv_pos_begin);
  return {ceil_div(begin, tile_kv), max(end, 0) / tile_kv};
}

}  // namespace plait
