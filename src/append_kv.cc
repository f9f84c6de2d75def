// append_kv: where each new token goes. Index arrays on the host are resolved here, entry by entry,
// to the slots that the executors write; those on the device are passed on unread.
#include <climits>
#include <utility>

#include "executor.h"
#include "formats/index_array.h"
#include "formats/table_refusals.h"
#include "host_device/convert.h"
#include "plait/attention.h"
#include "plait/error.h"
#include "tensor_checks.h"

namespace plait {
namespace {

constexpr char kWhere[] = "append_kv";

// Everything that names a token's place, as arrays.
struct Places {
  IndexArray slots, batch_indices, positions;
  IndexArray kv_len, kv_indptr, kv_begin, page_indptr, page_indices, last_page_len, request_map;
  TensorView block_table;
};

Places take_places(const AppendArgs& args, const Device& device, int64_t num_tokens) {
  const auto take = [&](const TensorView& t, const char* name) {
    return IndexArray(t, {kWhere, name}, device);
  };
  const KvTables& t = args.tables;
  Places p;
  p.slots = take(args.slot_mapping, "slot_mapping");
  if (p.slots.given()) {
    using Named = std::pair<const char*, const TensorView&>;
    for (const auto& [name, tensor] :
         {Named{"batch_indices", args.batch_indices}, Named{"positions", args.positions},
          Named{"kv_len", t.kv_len}, Named{"kv_indptr", t.kv_indptr}, Named{"kv_begin", t.kv_begin},
          Named{"kv_page_indptr", t.kv_page_indptr}, Named{"kv_page_indices", t.kv_page_indices},
          Named{"kv_last_page_len", t.kv_last_page_len}, Named{"block_table", t.block_table},
          Named{"request_map", t.request_map}}) {
      refuse_given(tensor, {kWhere, name}, "it has no meaning beside slot_mapping");
    }
    p.slots.require_size(num_tokens, "one a token of k_new");
    return p;
  }
  p.batch_indices = take(args.batch_indices, "batch_indices");
  p.positions = take(args.positions, "positions");
  if (!p.batch_indices.given() || !p.positions.given()) {
    refuse("append_kv: ", p.batch_indices.given() ? "positions" : "batch_indices",
           " is missing; give slot_mapping, or batch_indices, positions and a table");
  }
  p.batch_indices.require_size(num_tokens, "one a token of k_new");
  p.positions.require_size(num_tokens, "one a token of k_new");
  refuse_unread_tables(t, args.kv, kWhere);
  p.kv_len = take(t.kv_len, "kv_len");
  if (args.kv.kind == KvFormat::kRagged) {
    p.kv_indptr = take(t.kv_indptr, "kv_indptr");
    p.kv_begin = take(t.kv_begin, "kv_begin");
    if (p.kv_indptr.given()) {
      refuse_given(t.kv_begin, {kWhere, "kv_begin"}, "it has no meaning beside kv_indptr");
    }
    if (!p.kv_indptr.given() && !p.kv_begin.given()) {
      refuse("append_kv: kv_indptr is missing; ragged K and V need kv_indptr or kv_begin");
    }
    return p;
  }
  if (t.block_table.defined()) {
    p.block_table = t.block_table;
    check_block_table(p.block_table, {kWhere, "block_table"}, device);
    p.request_map = take(t.request_map, "request_map");
    return p;
  }
  p.page_indptr = take(t.kv_page_indptr, "kv_page_indptr");
  p.page_indices = take(t.kv_page_indices, "kv_page_indices");
  p.last_page_len = take(t.kv_last_page_len, "kv_last_page_len");
  if (!p.page_indptr.given() || !p.page_indices.given()) {
    refuse("append_kv: ", p.page_indptr.given() ? "kv_page_indices" : "kv_page_indptr",
           " is missing; paged K and V need kv_page_indptr and kv_page_indices, or block_table");
  }
  if (p.page_indptr.size() < 1) refuse("append_kv: kv_page_indptr has no entries");
  if (p.last_page_len.given()) {
    p.last_page_len.require_size(p.page_indptr.size() - 1, "one a request");
  }
  return p;
}

// Whether the arrays are on the host; they must be together.
bool all_on_host(const Places& p) {
  const IndexArray* first = nullptr;
  for (const IndexArray* a : {&p.slots, &p.batch_indices, &p.positions, &p.kv_indptr, &p.kv_begin,
                              &p.page_indptr, &p.page_indices, &p.request_map}) {
    if (!a->given()) continue;
    if (first == nullptr) first = a;
    if (a->on_host() != first->on_host()) {
      refuse(a->name().text(), " is on the ", a->on_host() ? "cpu" : "device", ", but ",
             first->name().array, " is on the ", first->on_host() ? "cpu" : "device",
             "; give all index arrays in one place");
    }
  }
  if (p.block_table.defined() && p.block_table.on_cpu() != first->on_host()) {
    refuse("append_kv: block_table is on the ", p.block_table.on_cpu() ? "cpu" : "device", ", but ",
           first->name().array, " is on the ", first->on_host() ? "cpu" : "device",
           "; give all index arrays in one place");
  }
  return first->on_host();
}

// Host arrays -> slots, each checked against tables and cache.
class SlotFinder {
 public:
  SlotFinder(const Places& places, const KvFormat& format, long long num_blocks)
      : p_(places), page_size_(format.page_size), num_blocks_(num_blocks) {
    for (const IndexArray* lengths : {&p_.kv_len, &p_.last_page_len}) {
      if (lengths->given()) lengths->require_host(lengths->size(), "");
    }
  }

  long long slot(long long token) const {
    if (p_.slots.given()) return mapped(token);
    const long long request = p_.batch_indices[token];
    if (request == -1) return -1;
    const long long n = num_requests();
    if (request < -1 || request >= n) {
      refuse(p_.batch_indices.at(token), " is ", request, "; it must be 0 ... ", n - 1,
             " (the tables have ", n, " requests), or -1 to skip the token");
    }
    const long long position = p_.positions[token];
    if (position < 0) {
      refuse(p_.positions.at(token), " is ", position, "; it must be >= 0");
    }
    if (p_.kv_len.given() && position >= p_.kv_len[request]) {
      refuse_position(token, position, request, p_.kv_len[request], "kv_len");
    }
    return p_.kv_indptr.given() || p_.kv_begin.given() ? row_slot(token, request, position)
                                                       : page_slot(token, request, position);
  }

 private:
  long long mapped(long long token) const {
    const long long slot = p_.slots[token], n = num_blocks_ * page_size_;
    if (slot < -1 || slot >= n) {
      refuse(p_.slots.at(token), " is ", slot, "; the cache has slots 0 ... ", n - 1,
             ", and -1 skips a token");
    }
    return slot;
  }

  long long num_requests() const {
    long long n = LLONG_MAX;
    const auto at_most = [&n](const IndexArray& a, int extra) {
      if (a.given()) n = std::min(n, a.size() - extra);
    };
    at_most(p_.kv_indptr, 1);
    at_most(p_.kv_begin, 0);
    at_most(p_.page_indptr, 1);
    at_most(p_.request_map, 0);
    at_most(p_.kv_len, 0);
    if (p_.block_table.defined() && !p_.request_map.given()) {
      n = std::min<long long>(n, p_.block_table.shape[0]);
    }
    return std::max(n, 0LL);
  }

  [[noreturn]] void refuse_position(long long token, long long position, long long request,
                                    long long limit, const char* by) const {
    refuse(p_.positions.at(token), " is ", position, ", but request ", request, " has ", limit,
           " keys by ", by);
  }

  long long row_slot(long long token, long long request, long long position) const {
    long long begin;
    if (p_.kv_indptr.given()) {
      begin = p_.kv_indptr[request];
      const long long end = p_.kv_indptr[request + 1];
      if (position >= end - begin) {
        refuse_position(token, position, request, end - begin, "kv_indptr");
      }
    } else {
      begin = p_.kv_begin[request];
    }
    const IndexArray& rows = p_.kv_indptr.given() ? p_.kv_indptr : p_.kv_begin;
    if (begin < 0 || begin >= num_blocks_ || position >= num_blocks_ - begin) {
      refuse(rows.at(request), " is ", begin, " and ", p_.positions.name().array, "[", token,
             "] is ", position, ", but k_cache has ", num_blocks_, " rows (k_cache.shape[0])");
    }
    return begin + position;
  }

  long long page_slot(long long token, long long request, long long position) const {
    const long long j = position / page_size_;
    long long page, num_pages, entry = 0, row = request;
    if (p_.block_table.defined()) {
      if (p_.request_map.given()) row = p_.request_map[request];
      if (row < 0 || row >= p_.block_table.shape[0]) {
        refuse(p_.request_map.at(request), " is ", row, ", but block_table has ",
               p_.block_table.shape[0], " rows");
      }
      num_pages = p_.block_table.shape[1];
      if (j >= num_pages) {
        refuse_position(token, position, request, num_pages * page_size_, "block_table");
      }
      const char* at =
          p_.block_table.bytes() + (row * p_.block_table.stride(0) + j * p_.block_table.stride(1)) *
                                       (p_.block_table.dtype_bits / 8);
      page = p_.block_table.dtype_bits == 64 ? *reinterpret_cast<const int64_t*>(at)
                                             : *reinterpret_cast<const int32_t*>(at);
    } else {
      const long long begin = p_.page_indptr[request], end = p_.page_indptr[request + 1];
      if (begin < 0 || end < begin || end > p_.page_indices.size()) {
        refuse(p_.page_indptr.at(request + 1), " is ", end, " after ", begin,
               "; entries must not decrease, nor pass the ", p_.page_indices.size(),
               " entries of kv_page_indices");
      }
      num_pages = end - begin;
      long long num_keys = num_pages * page_size_;
      if (p_.last_page_len.given() && num_pages > 0) {
        const long long last = p_.last_page_len[request];
        if (last < 1 || last > page_size_) {
          refuse(p_.last_page_len.at(request), " is ", last, "; it must be 1 ... ", page_size_,
                 " (page_size)");
        }
        num_keys += last - page_size_;
      }
      if (position >= num_keys) {
        refuse_position(token, position, request, num_keys, "kv_page_indptr");
      }
      entry = begin + j;
      page = p_.page_indices[entry];
    }
    if (page < 0 || page >= num_blocks_) {
      const std::string place = p_.block_table.defined()
                                    ? concat("append_kv: block_table[", row, ", ", j, "]")
                                    : p_.page_indices.at(entry);
      refuse(place, " is ", page, ", but the cache has ", num_blocks_, " pages (k_cache.shape[0])");
    }
    return page * page_size_ + position % page_size_;
  }

  const Places& p_;
  const long long page_size_, num_blocks_;
};

// The cache's, or where that is not of 8 bits k_new's, which the cache is then held against.
Dtype cache_dtype(const AppendArgs& args) {
  if (args.kv_dtype) {
    check(is_fp8(*args.kv_dtype), "append_kv: kv_dtype is ", to_string(*args.kv_dtype),
          "; it says what uint8 stands for: float8_e4m3fn or float8_e5m2");
    return *args.kv_dtype;
  }
  if (args.k_cache.dtype_bits != 8) return dtype_of(args.k_new, "append_kv: k_new");
  check(args.k_cache.dtype_code != 1, "append_kv: k_cache is ", Shown{args.k_cache},
        "; kv_dtype must say what its bits are, float8_e4m3fn or float8_e5m2");
  check(args.k_cache.dtype_code == 10 || args.k_cache.dtype_code == 12, "append_kv: k_cache is ",
        Shown{args.k_cache}, "; of 8 bits plait takes float8_e4m3fn and float8_e5m2");
  return dtype_of(args.k_cache, "append_kv: k_cache");
}

void require_dense(const IndexArray& array) {
  if (array.given() && array.size() > 1 && array.stride() != 1) {
    refuse(array.name().text(), " has stride ", array.stride(),
           "; on the device it must be contiguous");
  }
}

// Arrays on the device: unread, so lengths beside them could not be held against anything.
void pass_device_arrays(const Places& p, AppendParams& params) {
  for (const IndexArray* lengths : {&p.kv_len, &p.last_page_len}) {
    if (!lengths->given()) continue;
    refuse(lengths->name().text(),
           " is given, but positions on the device cannot be checked "
           "against it; leave it out");
  }
  if (p.slots.given()) {
    params.slots = p.slots.data();
    params.slots_bytes = p.slots.index_bytes();
    params.slots_stride = p.slots.stride();
    return;
  }
  params.batch_indices = p.batch_indices.data();
  params.batch_indices_bytes = p.batch_indices.index_bytes();
  params.batch_indices_stride = p.batch_indices.stride();
  params.positions = p.positions.data();
  params.positions_bytes = p.positions.index_bytes();
  params.positions_stride = p.positions.stride();
  BlockTable& table = params.table;
  const auto begin_with = [&table](const IndexArray& begin) {
    if (!begin.given()) return;
    require_dense(begin);
    table.list_begin = begin.data();
    table.list_begin_bytes = begin.index_bytes();
  };
  if (params.affine) {
    begin_with(p.kv_indptr.given() ? p.kv_indptr : p.kv_begin);
    return;
  }
  if (p.block_table.defined()) {
    table.indices = p.block_table.bytes();
    table.index_bytes = p.block_table.dtype_bits / 8;
    table.stride_list = p.block_table.stride(0);
    table.stride_block = p.block_table.stride(1);
    begin_with(p.request_map);
    return;
  }
  table.indices = p.page_indices.data();
  table.index_bytes = p.page_indices.index_bytes();
  table.stride_list = table.stride_block = p.page_indices.stride();
  begin_with(p.page_indptr);
}

}  // namespace

void append_kv(const AppendArgs& args, Stream stream) {
  check_format(kWhere, args.kv);
  check(args.kv.num_levels == 1, "append_kv: kv is a composed format of ", args.kv.num_levels,
        " levels; new tokens go through one table, so give the format that it is composed of");
  check(args.k_new.defined(), "append_kv: k_new is missing");
  const Dtype dtype_cache = cache_dtype(args);
  // What an fp8 cache holds may come as such numbers, or their bits, and is copied; or as values.
  const bool converts = is_fp8(dtype_cache) && args.k_new.dtype_bits != 8;
  const Dtype dtype = converts ? dtype_of(args.k_new, "append_kv: k_new") : dtype_cache;
  const Device device = args.k_new.device();
  check(device.type == kCpu || device.type == kCuda, "append_kv: k_new is ", Shown{args.k_new},
        "; plait runs on cpu and cuda");
  const TensorName k_new{kWhere, "k_new"}, v_new{kWhere, "v_new"};
  check_tensor(k_new, args.k_new, 3, dtype, device);
  check_last_dense(k_new, args.k_new);
  check_tensor(v_new, args.v_new, 3, dtype, device);
  check_shape(v_new, args.v_new, {args.k_new.shape[0], args.k_new.shape[1], -1},
              "tokens, num_kv_heads, head_dim_vo");
  check_last_dense(v_new, args.v_new);
  AppendParams params{};
  params.num_tokens = checked_rows(k_new, args.k_new.shape[0]);
  params.num_kv_heads = checked_rows(k_new, args.k_new.shape[1]);
  params.head_dim_qk = checked_rows(k_new, args.k_new.shape[2]);
  params.head_dim_vo = checked_rows(v_new, args.v_new.shape[2]);
  const KvTensors kv =
      check_kv(kWhere, "k_cache", "v_cache", args.kv, args.k_cache, args.v_cache, dtype_cache,
               device, params.num_kv_heads, params.head_dim_qk, params.head_dim_vo);
  check_no_overlap({kWhere, "k_cache"}, args.k_cache);
  if (args.v_cache.defined()) check_no_overlap({kWhere, "v_cache"}, args.v_cache);
  check_apart({kWhere, "k_cache"}, args.k_cache, "v_cache", args.v_cache);
  for (const auto& [name, input] :
       {std::pair<const char*, const TensorView&>{"k_new", args.k_new}, {"v_new", args.v_new}}) {
    check_apart({kWhere, "k_cache"}, args.k_cache, name, input);
    check_apart({kWhere, "v_cache"}, args.v_cache, name, input);
  }
  params.k_new = args.k_new.bytes();
  params.v_new = args.v_new.bytes();
  params.k_cache = kv.k;
  params.v_cache = kv.v;
  params.k_new_stride = row_strides(args.k_new);
  params.v_new_stride = row_strides(args.v_new);
  params.k_stride = kv.k_stride;
  params.v_stride = kv.v_stride;
  params.block_size = args.kv.page_size;
  params.dtype_new = dtype;
  params.dtype_cache = dtype_cache;
  check_scale({kWhere, "k_scale"}, args.k_scale, converts);
  check_scale({kWhere, "v_scale"}, args.v_scale, converts);
  params.k_scale = args.k_scale;
  params.v_scale = args.v_scale;
  params.affine = args.kv.kind == KvFormat::kRagged;

  const Places places = take_places(args, device, params.num_tokens);
  thread_local std::vector<int64_t> slots;  // kept: an engine appends before every layer
  if (all_on_host(places)) {
    const SlotFinder finder(places, args.kv, kv.num_blocks);
    slots.resize(params.num_tokens);
    for (int i = 0; i < params.num_tokens; ++i) slots[i] = finder.slot(i);
    params.slots = slots.data();
    params.slots_on_host = true;
    params.slots_bytes = 8;
    params.slots_stride = 1;
  } else {
    pass_device_arrays(places, params);
  }
  if (params.num_tokens == 0 || params.num_kv_heads == 0) return;
  if (device.type == kCuda) {
    cuda_append_kv(params, device, stream);
  } else {
    cpu_append_kv(params);
  }
}

}  // namespace plait
