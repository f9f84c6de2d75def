// Writes new tokens' K and V into a paged or ragged cache, by slot or by batch index and position.
// One warp takes a row of K or V of one (token, head). A copy goes in units of 16 bytes where
// pointers and strides allow it, else element by element; values for an fp8 cache are rounded.
#pragma once
#include "host_device/convert.h"
#include "host_device/kv_address.h"
#include "host_device/utility_calls.h"
#include "tile/begin.cuh"

namespace plait {

// Where token `i` goes; block -1: nowhere.
PLAIT_DEVICE KeySlot append_slot(const AppendKvCall& call, int i) {
  if (call.slots != nullptr) {
    const i64 slot = load_index(call.slots, call.slots_bytes, i * call.slots_stride);
    if (slot < 0) return {-1, 0};
    if (call.affine) return {slot, 0};
    const i64 block = slot / call.block_size;
    return {block, static_cast<int>(slot - block * call.block_size)};
  }
  const i64 request =
      load_index(call.batch_indices, call.batch_indices_bytes, i * call.batch_indices_stride);
  if (request < 0) return {-1, 0};
  const i64 position = load_index(call.positions, call.positions_bytes, i * call.positions_stride);
  const BlockTable& table = call.table;
  const i64 list = table.list_begin != nullptr
                       ? load_index(table.list_begin, table.list_begin_bytes, request)
                       : request;
  const i64 first = list * table.stride_list;
  return key_slot(table, first, call.block_size, static_cast<int>(position));
}

template <class Unit>
PLAIT_DEVICE void copy_row(char* to, const char* from, int bytes, int lane) {
  const int num_units = bytes / static_cast<int>(sizeof(Unit));
#pragma unroll 2
  for (int i = lane; i < num_units; i += 32) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
}

PLAIT_DEVICE void copy_row(char* to, const char* from, int bytes, int unit, int lane) {
  struct alignas(16) Unit16 {
    unsigned x[4];
  };
  if (unit == 16) {
    copy_row<Unit16>(to, from, bytes, lane);
  } else if (unit == 4) {
    copy_row<unsigned>(to, from, bytes, lane);
  } else if (unit == 2) {
    copy_row<unsigned short>(to, from, bytes, lane);
  } else {
    copy_row<char>(to, from, bytes, lane);
  }
}

template <class To, class From>
PLAIT_DEVICE void quantise_row(char* to, const char* from, int dim, float scale, int lane) {
#pragma unroll 2
  for (int i = lane; i < dim; i += 32) {
    reinterpret_cast<To*>(to)[i] =
        from_float<To>(to_float(reinterpret_cast<const From*>(from)[i]) / scale);
  }
}
template <class To>
PLAIT_DEVICE void quantise_row(char* to, const char* from, Dtype dtype_from, int dim, float scale,
                               int lane) {
  if (dtype_from == Dtype::kFloat32) {
    quantise_row<To, float>(to, from, dim, scale, lane);
  } else if (dtype_from == Dtype::kBfloat16) {
    quantise_row<To, Bfloat16>(to, from, dim, scale, lane);
  } else {
    quantise_row<To, Float16>(to, from, dim, scale, lane);
  }
}

// Any grid of whole warps.
PLAIT_DEVICE void append_kv(const AppendKvCall& call) {
  begin_kernel();
  const int lane = threadIdx.x % 32;
  const i64 num_warps = static_cast<i64>(gridDim.x) * (blockDim.x / 32);
  const i64 first = static_cast<i64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const i64 num_rows = 2 * static_cast<i64>(call.num_tokens) * call.num_kv_heads;
#pragma unroll 1
  for (i64 row = first; row < num_rows; row += num_warps) {  // of K and V in turn
    const bool is_key = row % 2 == 0;
    const int token = static_cast<int>(row / 2 / call.num_kv_heads);
    const int head = static_cast<int>(row / 2 % call.num_kv_heads);
    const KeySlot slot = append_slot(call, token);
    if (slot.block < 0) continue;
    const RowStrides& from = is_key ? call.k_new_stride : call.v_new_stride;
    const KvStrides& to = is_key ? call.k_stride : call.v_stride;
    char* const row_to =
        (is_key ? call.k_cache : call.v_cache) + key_offset(to, slot, head, call.affine != 0);
    const char* const row_from =
        (is_key ? call.k_new : call.v_new) + token * from.token + head * from.head;
    const int bytes = is_key ? call.k_row_bytes : call.v_row_bytes;
    const float scale = is_key ? call.k_scale : call.v_scale;
    if (call.dtype_new == call.dtype_cache) {
      copy_row(row_to, row_from, bytes, is_key ? call.k_unit : call.v_unit, lane);
    } else if (call.dtype_cache == Dtype::kE4m3) {
      quantise_row<E4m3>(row_to, row_from, call.dtype_new, bytes, scale, lane);
    } else {
      quantise_row<E5m2>(row_to, row_from, call.dtype_new, bytes, scale, lane);
    }
  }
}

}  // namespace plait
