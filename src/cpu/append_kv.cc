// append_kv on the CPU: the rows of new tokens go to their slots of the cache, as they are or
// rounded to 8 bits.
#include <cstring>

#include "cpu/thread_pool.h"
#include "executor.h"
#include "host_device/convert.h"
#include "host_device/kv_address.h"

namespace plait {
namespace {

// Where token i goes; false if it is skipped.
bool slot_of(const AppendParams& p, int i, KeySlot& slot) {
  if (p.slots != nullptr) {
    const i64 s = load_index(p.slots, p.slots_bytes, i * p.slots_stride);
    if (s < 0) return false;
    slot = p.affine ? KeySlot{s, 0} : KeySlot{s / p.block_size, static_cast<int>(s % p.block_size)};
    return true;
  }
  const i64 request =
      load_index(p.batch_indices, p.batch_indices_bytes, i * p.batch_indices_stride);
  if (request < 0) return false;
  const i64 position = load_index(p.positions, p.positions_bytes, i * p.positions_stride);
  const BlockTable& table = p.table;
  const i64 list = table.list_begin != nullptr
                       ? load_index(table.list_begin, table.list_begin_bytes, request)
                       : request;
  slot = key_slot(table, list * table.stride_list, p.block_size, static_cast<int>(position));
  return true;
}

template <class To, class From>
void quantise(const void* from, i64 from_offset, void* to, i64 to_offset, int dim, float scale) {
  const From* x = static_cast<const From*>(from) + from_offset;
  To* y = static_cast<To*>(to) + to_offset;
  for (int d = 0; d < dim; ++d) y[d] = from_float<To>(to_float(x[d]) / scale);
}

template <class To>
void quantise(Dtype dtype_from, const void* from, i64 from_offset, void* to, i64 to_offset, int dim,
              float scale) {
  if (dtype_from == Dtype::kFloat32) {
    quantise<To, float>(from, from_offset, to, to_offset, dim, scale);
  } else if (dtype_from == Dtype::kBfloat16) {
    quantise<To, Bfloat16>(from, from_offset, to, to_offset, dim, scale);
  } else {
    quantise<To, Float16>(from, from_offset, to, to_offset, dim, scale);
  }
}

}  // namespace

void cpu_append_kv(const AppendParams& params) {
  const AppendParams& p = params;
  const i64 bytes = bytes_of(p.dtype_cache);
  const auto write_rows = [&](const void* from, const RowStrides& from_stride, void* to,
                              const KvStrides& to_stride, int dim, float scale, int i,
                              const KeySlot& slot) {
    for (int h = 0; h < p.num_kv_heads; ++h) {
      const i64 from_offset = i * from_stride.token + h * from_stride.head;
      const i64 to_offset = key_offset(to_stride, slot, h, p.affine);
      if (p.dtype_new == p.dtype_cache) {
        std::memcpy(static_cast<char*>(to) + to_offset * bytes,
                    static_cast<const char*>(from) + from_offset * bytes,
                    static_cast<std::size_t>(dim * bytes));
      } else if (p.dtype_cache == Dtype::kE4m3) {
        quantise<E4m3>(p.dtype_new, from, from_offset, to, to_offset, dim, scale);
      } else {
        quantise<E5m2>(p.dtype_new, from, from_offset, to, to_offset, dim, scale);
      }
    }
  };
  const i64 token_bytes = bytes * p.num_kv_heads * (p.head_dim_qk + p.head_dim_vo);
  const int max_threads = p.num_tokens * token_bytes < (1 << 18) ? 1 : 0;
  cpu::thread_pool().run(p.num_tokens, max_threads, [&](int i, int) {
    KeySlot slot;
    if (!slot_of(p, i, slot)) return;
    write_rows(p.k_new, p.k_new_stride, p.k_cache, p.k_stride, p.head_dim_qk, p.k_scale, i, slot);
    write_rows(p.v_new, p.v_new_stride, p.v_cache, p.v_stride, p.head_dim_vo, p.v_scale, i, slot);
  });
}

}  // namespace plait
