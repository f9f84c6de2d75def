// Where a key lies: list position -> (block, offset) -> element offset, 64-bit throughout.
// Everything a KV format changes about a kernel is in this file.
#pragma once
#include "host_device/config.h"

namespace plait {

PLAIT_HD i64 load_index(const void* indices, int index_bytes, i64 i) {
  return index_bytes == 8 ? static_cast<const i64*>(indices)[i]
                          : static_cast<i64>(static_cast<const int*>(indices)[i]);
}

// Entry of `table` at which the block list of `block` starts (affine: its first row of K and V).
PLAIT_HD i64 first_entry(const BlockTable& table, const RowBlock& block) {
  if (table.list_begin == nullptr) return block.first_block;
  return load_index(table.list_begin, table.list_begin_bytes, block.first_block) *
         table.stride_list;
}

// All that a loader needs of the block list of a row block: where its entry 0 lies and what lies
// between two, in bytes. Affine: no entries, but the first row of K and V.
struct BlockList {
  i64 begin, stride;
};
PLAIT_HD BlockList block_list(const BlockTable& table, const RowBlock& block) {
  const i64 first = first_entry(table, block);
  if (table.indices == nullptr) return {first, 0};
  return {reinterpret_cast<i64>(table.indices) + first * table.index_bytes,
          table.stride_block * table.index_bytes};
}

struct KeySlot {
  i64 block;   // page, or row of K and V where affine
  int offset;  // token within the page
};

// Slot of list position i, for the list that starts at entry `first`.
PLAIT_HD KeySlot key_slot(const BlockTable& table, i64 first, int block_size, int i) {
  if (table.indices == nullptr) return {first + i, 0};
  const int block = i / block_size;
  return {load_index(table.indices, table.index_bytes, first + block * table.stride_block),
          i - block * block_size};
}

PLAIT_HD i64 key_offset(const KvStrides& stride, const KeySlot& slot, int kv_head, bool affine) {
  return slot.block * (affine ? stride.token : stride.block) + slot.offset * stride.token +
         kv_head * stride.head;
}

// Division of 0 <= n < 2^31 by a d that is known before: a product and a shift.
// Source: Granlund and Montgomery, 1994, "Division by invariant integers using multiplication".
struct Divisor {
  unsigned multiplier, shift;  // 2^(31 + shift) / d, rounded up; 2^shift >= d
};
PLAIT_HD Divisor divisor_of(int d) {
  unsigned shift = 0;
  while (1ll << shift < d) ++shift;
  return {static_cast<unsigned>(((1ll << (31 + shift)) + d - 1) / d), shift};
}
PLAIT_HD int divide(int n, const Divisor& by) {
  const auto doubled = static_cast<unsigned long long>(2u * static_cast<unsigned>(n));
  return static_cast<int>(static_cast<unsigned>(doubled * by.multiplier >> 32) >> by.shift);
}

// Rows of K or V in multiples of what their distances have in common: a slot lies number(slot) *
// bytes behind slot (0, 0), which 32 bits are enough for. The host sees to that (cuda/row_units.h).
struct RowUnits {
  int block, token, bytes;
  PLAIT_HD int number(int slot_block, int slot_offset) const {
    return slot_block * block + slot_offset * token;
  }
};

}  // namespace plait
