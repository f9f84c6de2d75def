// The C API: structs of raw pointers become TensorViews, exceptions become status codes. No check
// of its own but of what TensorViews cannot say: sizes of structs, null pointers, negative counts.
#include "plait/c_api.h"

#include <algorithm>
#include <cstring>

#include "host_device/convert.h"
#include "plait/attention.h"
#include "plait/compose_radix.h"
#include "plait/error.h"
#include "tensor_checks.h"

struct plait_attention {
  explicit plait_attention(const plait::AttentionConfig& config,
                           std::shared_ptr<plait::Workspace> workspace)
      : attention(config, std::move(workspace)), kernel_name(attention.kernel_name()) {}
  plait::Attention attention;
  std::string kernel_name;
  std::string explanation;
};

struct plait_levels {
  plait::ComposedLevels levels;
};

namespace plait {
namespace {

thread_local std::string last_error;

template <class F>
plait_status guarded(F f) {
  try {
    f();
    return PLAIT_OK;
  } catch (const ArgumentError& e) {
    last_error = e.what();
    return PLAIT_INVALID_ARGUMENT;
  } catch (const std::exception& e) {
    last_error = e.what();
    return PLAIT_FAILURE;
  }
}

template <class Struct>
void check_struct(const char* name, const Struct* given) {
  check(given != nullptr, name, " is NULL");
  check(given->struct_size == sizeof(Struct), name, ".struct_size is ", given->struct_size,
        ", but this library's has ", sizeof(Struct), " bytes; call ", name,
        "_init first, of the header that belongs to the library");
}

template <class Struct>
void init(Struct* s) {
  if (s == nullptr) return;  // void: the call that the struct is for says so
  *s = Struct{};
  s->struct_size = sizeof(Struct);
}

// Makes TensorViews of raw pointers and owns their shapes and strides; lives as long as a call.
class Views {
 public:
  explicit Views(const char* where) : where_(where) {}

  void fill(TensorView& view, const char* name, const void* data, const Device& device,
            std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
    if (data == nullptr && size_of(shape) != 0) return;  // not given
    check_sizes(name, shape);
    view.data = const_cast<void*>(data);
    view.device_type = device.type;
    view.device_id = device.id;
    view.ndim = static_cast<int32_t>(shape.size());
    view.shape = store(shape);
    const bool dense =
        std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s == 0; });
    view.strides = dense ? nullptr : store(strides);
  }
  TensorView floats(const char* name, const void* data, Dtype dtype, const Device& device,
                    std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
    TensorView view;
    fill(view, name, data, device, shape, strides);
    view.dtype_code = dtype == Dtype::kBfloat16 ? 4
                      : dtype == Dtype::kE4m3   ? 10
                      : dtype == Dtype::kE5m2   ? 12
                                                : 2;
    view.dtype_bits = bytes_of(dtype) * 8;
    return view;
  }
  template <class Int>
  TensorView ints(const char* name, const Int* data, const Device& device,
                  std::initializer_list<int64_t> shape,
                  std::initializer_list<int64_t> strides = {}) {
    TensorView view;
    if (data == nullptr) return view;
    fill(view, name, data, device, shape, strides);
    view.dtype_bits = sizeof(Int) * 8;
    return view;
  }
  // n + 1 entries, of which the last is read to size another array.
  int64_t last_of(const char* name, const int32_t* indptr, int64_t n) const {
    check(indptr[n] >= 0, where_, ": ", name, "[", n, "] is ", indptr[n], "; it must be >= 0");
    return indptr[n];
  }

 private:
  static int64_t size_of(std::initializer_list<int64_t> shape) {
    int64_t size = 1;
    for (const int64_t s : shape) size *= s;
    return size;
  }
  void check_sizes(const char* name, std::initializer_list<int64_t> shape) const {
    for (const int64_t s : shape) {
      check(s >= 0, where_, ": ", name, " has a dimension of ", s, "; sizes must be >= 0");
    }
  }
  int64_t* store(std::initializer_list<int64_t> numbers) {
    check(used_ + numbers.size() <= std::size(numbers_), where_, ": too many arrays");
    int64_t* const at = numbers_ + used_;
    std::copy(numbers.begin(), numbers.end(), at);
    used_ += numbers.size();
    return at;
  }

  const char* where_;
  int64_t numbers_[512];  // kMaxLevels of every array
  size_t used_ = 0;
};

Dtype dtype_from(const char* where, int32_t dtype) {
  switch (dtype) {
    case PLAIT_FLOAT32:
      return Dtype::kFloat32;
    case PLAIT_BFLOAT16:
      return Dtype::kBfloat16;
    case PLAIT_FLOAT16:
      return Dtype::kFloat16;
  }
  check(false, where, ": dtype is ", dtype,
        "; it must be PLAIT_FLOAT32 (0), PLAIT_BFLOAT16 (1) or PLAIT_FLOAT16 (2)");
  return {};
}

// Of K and V beside `dtype`.
Dtype kv_dtype_from(const char* where, int32_t kv_dtype, Dtype dtype) {
  switch (kv_dtype) {
    case PLAIT_AS_DTYPE:
      return dtype;
    case PLAIT_FLOAT8_E4M3FN:
      return Dtype::kE4m3;
    case PLAIT_FLOAT8_E5M2:
      return Dtype::kE5m2;
  }
  check(false, where, ": kv_dtype is ", kv_dtype,
        "; it must be PLAIT_AS_DTYPE (-1), PLAIT_FLOAT8_E4M3FN (3) or PLAIT_FLOAT8_E5M2 (4)");
  return {};
}

KvFormat format_from(const char* where, int32_t kind, int32_t page_size, int32_t hnd,
                     int32_t num_levels) {
  check(kind == PLAIT_RAGGED || kind == PLAIT_PAGED, where, ": kv_kind is ", kind,
        "; it must be PLAIT_RAGGED (0) or PLAIT_PAGED (1)");
  KvFormat format;
  format.kind = kind == PLAIT_PAGED ? KvFormat::kPaged : KvFormat::kRagged;
  format.page_size = page_size;
  format.hnd = hnd != 0;
  format.num_levels = num_levels;
  return format;
}

Variant variant_from(const plait_config& c) {
  check(c.window_left >= -1, "plait_config: window_left is ", c.window_left,
        "; it must be >= 0, or -1 for no window");
  check(c.window_left >= 0 || c.sink_tokens == 0, "plait_config: sink_tokens is ", c.sink_tokens,
        ", but there is no window for them to be outside of; set window_left");
  Variant variant = c.causal ? causal() : full();
  if (c.window_left >= 0) variant = variant | sliding_window(c.window_left, c.sink_tokens);
  if (c.custom_mask) variant = variant | custom_mask();
  if (c.rms_norm_q_eps != 0) variant = variant | rms_norm_q(c.rms_norm_q_eps);
  if (c.rms_norm_k_eps != 0) variant = variant | rms_norm_k(c.rms_norm_k_eps);
  if (c.rope) {
    variant =
        variant | rope({c.rope_theta, c.rope_scale, c.rope_interleave != 0, c.rope_rotary_dim,
                        c.rope_low_freq_factor, c.rope_high_freq_factor, c.rope_old_context_len});
  }
  if (c.alibi) variant = variant | alibi();
  if (c.soft_cap != 0) variant = variant | soft_cap(c.soft_cap);
  if (c.variant_source == nullptr) {
    check(c.variant_name == nullptr && c.variant_struct == nullptr && c.num_variant_params == 0,
          "plait_config: variant_source is NULL, but other variant_ fields are set");
    return variant;
  }
  check(c.variant_name != nullptr && c.variant_struct != nullptr,
        "plait_config: variant_source is set, but variant_name or variant_struct is NULL");
  check(c.num_variant_params >= 0, "plait_config: num_variant_params is ", c.num_variant_params,
        "; it must be >= 0");
  check(c.num_variant_params == 0 || c.variant_params != nullptr,
        "plait_config: variant_params is NULL, but num_variant_params is ", c.num_variant_params);
  std::vector<VariantParam> params;
  for (int i = 0; i < c.num_variant_params; ++i) {
    const plait_param& p = c.variant_params[i];
    check(p.name != nullptr, "plait_config: variant_params[", i, "].name is NULL");
    check(p.kind >= PLAIT_PARAM_FLOAT && p.kind <= PLAIT_PARAM_TENSOR,
          "plait_config: variant_params[", i, "].kind is ", p.kind,
          "; it must be PLAIT_PARAM_FLOAT (0), _INT (1) or _TENSOR (2)");
    params.push_back({p.name, static_cast<VariantParam::Kind>(p.kind), p.number});
  }
  return variant | custom(c.variant_name, c.variant_struct, c.variant_source, std::move(params),
                          !c.variant_without_softmax);
}

AttentionConfig config_from(const plait_config* given) {
  check_struct("plait_config", given);
  const plait_config& c = *given;
  AttentionConfig config;
  config.num_qo_heads = c.num_qo_heads;
  config.num_kv_heads = c.num_kv_heads;
  config.head_dim_qk = c.head_dim_qk;
  config.head_dim_vo = c.head_dim_vo;
  config.dtype = dtype_from("plait_config", c.dtype);
  config.kv_dtype = kv_dtype_from("plait_config", c.kv_dtype, config.dtype);
  config.kv = format_from("plait_config", c.kv_kind, c.page_size, c.hnd, c.num_levels);
  config.variant = variant_from(c);
  config.bounds = {c.max_requests, c.max_query_tokens, c.max_keys, c.max_total_pages, c.max_q_len};
  config.device = {c.device_type, c.device_id};
  config.sm_scale = c.sm_scale;
  check(c.scheduler >= PLAIT_SCHEDULE_AUTO && c.scheduler <= PLAIT_SCHEDULE_PREFIX_SUM,
        "plait_config: scheduler is ", c.scheduler,
        "; it must be PLAIT_SCHEDULE_AUTO (0), PLAIT_SCHEDULE_LPT (1), PLAIT_SCHEDULE_UNSPLIT (2) "
        "or PLAIT_SCHEDULE_PREFIX_SUM (3)");
  constexpr Scheduler kSchedulers[] = {Scheduler::kAuto, Scheduler::kLpt, Scheduler::kUnsplit,
                                       Scheduler::kPrefixSum};
  config.scheduler = kSchedulers[c.scheduler];
  if (c.kernel != nullptr) config.kernel = c.kernel;
  config.max_ctas = c.max_ctas;
  config.chunk_keys = c.chunk_keys;
  return config;
}

std::shared_ptr<Workspace> workspace_from(const plait_config& c) {
  if (c.workspace == nullptr) {
    check(c.workspace_bytes == 0, "plait_config: workspace_bytes is ", c.workspace_bytes,
          ", but workspace is NULL");
    return nullptr;
  }
  check(c.workspace_bytes >= 0, "plait_config: workspace_bytes is ", c.workspace_bytes);
  int64_t shape[] = {c.workspace_bytes};
  TensorView buffer;
  buffer.data = c.workspace;
  buffer.device_type = c.device_type;
  buffer.device_id = c.device_id;
  buffer.ndim = 1;
  buffer.dtype_code = 1;
  buffer.dtype_bits = 8;
  buffer.shape = shape;
  return std::make_shared<Workspace>(buffer);
}

// The tables of no requests: every array may be NULL then, but counts as given.
constexpr int32_t kNothing[1] = {0};
constexpr int64_t kNoSlots[1] = {0};

plait_kv_tables with_empty(plait_kv_tables t, int64_t n, bool ragged) {
  if (n > 0) return t;
  if (t.kv_len == nullptr && t.kv_last_page_len == nullptr) t.kv_len = kNothing;
  if (ragged && t.kv_indptr == nullptr) t.kv_begin = kNothing;
  if (!ragged && t.kv_page_indptr == nullptr) t.block_table = kNothing;
  return t;
}

KvTables tables_from(Views& views, plait_kv_tables t, int64_t n, const Device& device) {
  check(t.struct_size == sizeof t || t.struct_size == 0, "plait_kv_tables.struct_size is ",
        t.struct_size, ", but this library's has ", sizeof t, " bytes");
  check((t.on_device & ~31) == 0, "plait_kv_tables: on_device is ", t.on_device,
        "; it must be a sum of PLAIT_ON_DEVICE_...");
  if (t.kv_page_indptr != nullptr && t.kv_page_indices == nullptr && t.num_page_indices == 0) {
    t.kv_page_indices = kNothing;
  }
  const Device host;
  const auto place = [&](int32_t bit) {
    return (t.on_device & (bit | PLAIT_ON_DEVICE_LENGTHS)) != 0 ? device : host;
  };
  const Device lengths = place(PLAIT_ON_DEVICE_LENGTHS);
  KvTables tables;
  tables.kv_len = views.ints("kv_len", t.kv_len, lengths, {n});
  tables.kv_indptr = views.ints("kv_indptr", t.kv_indptr, lengths, {n + 1});
  tables.kv_begin = views.ints("kv_begin", t.kv_begin, lengths, {n});
  tables.kv_page_indptr =
      views.ints("kv_page_indptr", t.kv_page_indptr, place(PLAIT_ON_DEVICE_PAGE_INDPTR), {n + 1});
  tables.kv_page_indices = views.ints("kv_page_indices", t.kv_page_indices,
                                      place(PLAIT_ON_DEVICE_PAGE_INDICES), {t.num_page_indices});
  tables.kv_last_page_len = views.ints("kv_last_page_len", t.kv_last_page_len, lengths, {n});
  tables.block_table = views.ints("block_table", t.block_table, place(PLAIT_ON_DEVICE_BLOCK_TABLE),
                                  {t.block_table_rows, t.block_table_columns},
                                  {t.block_table_stride_row, t.block_table_stride_column});
  tables.request_map =
      views.ints("request_map", t.request_map, place(PLAIT_ON_DEVICE_REQUEST_MAP), {n});
  return tables;
}

std::vector<VariantArg> params_from(Views& views, const plait_run_args& a, const Device& device) {
  check(a.num_params == 0 || (a.num_params > 0 && a.params != nullptr), "plait_run: num_params is ",
        a.num_params, a.params == nullptr ? ", but params is NULL" : "; it must be >= 0");
  std::vector<VariantArg> args(a.num_params);
  for (int i = 0; i < a.num_params; ++i) {
    const plait_param& p = a.params[i];
    check(p.name != nullptr, "plait_run: params[", i, "].name is NULL");
    args[i].name = p.name;
    args[i].number = p.number;
    if (p.tensor == nullptr) continue;
    args[i].tensor = views.floats(p.name, p.tensor, Dtype::kFloat32, device, {p.num_elements}, {});
  }
  return args;
}

struct CacheShape {
  bool ragged, hnd;
  int64_t num_blocks, page_size, num_heads;
};

TensorView cache(Views& views, const char* name, const void* data, Dtype dtype,
                 const Device& device, const CacheShape& c, int64_t dim, int64_t page,
                 int64_t token, int64_t head) {
  if (c.ragged) {
    const bool dense = token == 0 && head == 0;
    return views.floats(name, data, dtype, device, {c.num_blocks, c.num_heads, dim},
                        {token, head, dense ? 0 : 1});
  }
  const int64_t last = page == 0 && token == 0 && head == 0 ? 0 : 1;
  return c.hnd ? views.floats(name, data, dtype, device,
                              {c.num_blocks, c.num_heads, c.page_size, dim},
                              {page, head, token, last})
               : views.floats(name, data, dtype, device,
                              {c.num_blocks, c.page_size, c.num_heads, dim},
                              {page, token, head, last});
}

TensorView rows(Views& views, const char* name, const void* data, Dtype dtype, const Device& device,
                int64_t num_rows, int64_t num_heads, int64_t dim, int64_t token, int64_t head) {
  return views.floats(name, data, dtype, device, {num_rows, num_heads, dim},
                      {token, head, token == 0 && head == 0 ? 0 : 1});
}

plait_levels* compose(const plait_attention* a, const plait_radix_args* args) {
  check(a != nullptr, "plait_compose_radix: attention is NULL");
  check_struct("plait_radix_args", args);
  const plait_radix_args& r = *args;
  const int64_t n = r.num_requests;
  check(n >= 0 && r.num_nodes >= 0, "plait_radix_args: num_requests is ", n, " and num_nodes ",
        r.num_nodes, "; they must be >= 0");
  const bool tree = r.node_parent != nullptr || r.request_node != nullptr;
  const bool hashes = r.hash_indptr != nullptr || r.hash_ids != nullptr || r.hashed_len != nullptr;
  check(r.tables.on_device == 0, "plait_radix_args: tables.on_device is ", r.tables.on_device,
        "; levels are composed on the host: give host arrays and 0");
  check(tree != hashes, "plait_radix_args: ", tree ? "both" : "neither",
        " given; taken are node_parent and request_node, or hash_indptr and hash_ids");
  const AttentionConfig& config = a->attention.config();
  const RadixOptions options{config.kv, a->attention.target(), config.variant.visible,
                             r.max_levels};
  const Device host;
  const bool ragged = config.kv.kind == KvFormat::kRagged;
  Views views("plait_compose_radix");
  const TensorView qo_indptr = views.ints("qo_indptr", r.qo_indptr, host, {n + 1});
  const int64_t lists = tree ? r.num_nodes : n;
  const KvTables tables = tables_from(views, with_empty(r.tables, lists, ragged), lists, host);
  if (tree) {
    const RadixTree from{views.ints("node_parent", r.node_parent, host, {lists}), tables,
                         views.ints("request_node", r.request_node, host, {n})};
    return new plait_levels{compose_radix(from, qo_indptr, options)};
  }
  BlockHashes from{views.ints("hash_indptr", r.hash_indptr, host, {n + 1}),
                   {},
                   views.ints("hashed_len", r.hashed_len, host, {n}),
                   r.block_tokens,
                   tables};
  if (r.hash_indptr != nullptr) {
    const int64_t num_ids = views.last_of("hash_indptr", r.hash_indptr, n);
    const int64_t* ids = r.hash_ids == nullptr && num_ids == 0 ? kNoSlots : r.hash_ids;
    from.hash_ids = views.ints("hash_ids", ids, host, {num_ids});
  }
  return new plait_levels{compose_radix(from, qo_indptr, options)};
}

void plan(plait_attention* a, const plait_batch* b, void* stream) {
  check(a != nullptr, "plait_plan: attention is NULL");
  check_struct("plait_batch", b);
  const int64_t n = b->num_requests;
  check(n >= 0, "plait_batch: num_requests is ", n, "; it must be >= 0");
  check(b->num_levels >= 0 && b->num_levels <= kMaxLevels, "plait_batch: num_levels is ",
        b->num_levels, "; it must be 0 ... ", kMaxLevels);
  check(b->num_levels == 0 || b->levels != nullptr,
        "plait_batch: levels is NULL, but num_levels is ", b->num_levels);
  check(b->composed == nullptr || b->num_levels == 0,
        "plait_batch: composed is given beside levels; num_levels must be 0");
  const Device host, device = a->attention.config().device;
  Views views("plait_plan");
  Batch batch;
  const bool lengths_on_device = (b->kv.on_device & PLAIT_ON_DEVICE_LENGTHS) != 0;
  check(!lengths_on_device || device.type != kCpu,
        "plait_batch: kv.on_device has PLAIT_ON_DEVICE_LENGTHS, but the attention is on the cpu");
  check(!lengths_on_device || b->q_positions == nullptr,
        "plait_batch: q_positions is given, but kv.on_device has PLAIT_ON_DEVICE_LENGTHS; ",
        "positions are planned on the host");
  batch.qo_indptr =
      views.ints("qo_indptr", b->qo_indptr, lengths_on_device ? device : host, {n + 1});
  const KvFormat& format = a->attention.config().kv;
  const bool ragged = format.kind == KvFormat::kRagged;
  const bool flat = format.num_levels == 1;
  batch.kv = tables_from(views, flat ? with_empty(b->kv, n, ragged) : b->kv, n, device);
  batch.levels.resize(b->num_levels);
  for (int i = 0; i < b->num_levels; ++i) {
    const plait_level& from = b->levels[i];
    KvLevel& to = batch.levels[i];
    check(from.num_nodes >= 0, "plait_level: num_nodes is ", from.num_nodes,
          "; it must be >= 0 (level ", i, ")");
    const int64_t nodes = from.node_indptr != nullptr ? from.num_nodes : n;
    to.tables = tables_from(views, with_empty(from.tables, nodes, ragged), nodes, device);
    if (from.node_indptr == nullptr) {
      check(from.node_requests == nullptr,
            "plait_level: node_requests is given without "
            "node_indptr (level ",
            i, ")");
      continue;
    }
    to.node_indptr = views.ints("node_indptr", from.node_indptr, host, {nodes + 1});
    to.node_requests = views.ints("node_requests", from.node_requests, host,
                                  {views.last_of("node_indptr", from.node_indptr, nodes)});
  }
  if (b->composed != nullptr) {
    batch.levels = b->composed->levels.levels();
    batch.nodes = b->composed->levels.nodes();
  }
  check(b->mask_bits != nullptr || b->num_mask_bytes == 0,
        "plait_batch: mask_bits is NULL, but num_mask_bytes is ", b->num_mask_bytes);
  // Of a batch without masked keys there may be no memory.
  const bool masked = a->attention.config().variant.custom_mask() || b->mask_bits != nullptr;
  const auto* bits =
      b->mask_bits != nullptr ? b->mask_bits : reinterpret_cast<const uint8_t*>(kNothing);
  if (masked) {
    batch.mask.packed =
        views.ints("mask_bits", bits, b->mask_on_device ? device : host, {b->num_mask_bytes});
    batch.mask.packed.dtype_code = 1;
  }
  batch.mask.first_masked_key = views.ints("first_masked_key", b->first_masked_key, host, {n});
  const int64_t tokens =
      b->q_positions != nullptr ? views.last_of("qo_indptr", b->qo_indptr, n) : 0;
  batch.q_positions = views.ints("q_positions", b->q_positions, host, {tokens});
  a->attention.plan(batch, stream);
}

void run(plait_attention* a, const plait_run_args* args, void* stream) {
  check(a != nullptr, "plait_run: attention is NULL");
  check_struct("plait_run_args", args);
  const plait_run_args& r = *args;
  const AttentionConfig& c = a->attention.config();
  const CacheShape shape{c.kv.kind == KvFormat::kRagged, c.kv.hnd, r.num_kv_blocks, c.kv.page_size,
                         c.num_kv_heads};
  Views views("plait_run");
  RunArgs to;
  to.q = rows(views, "q", r.q, c.dtype, c.device, r.num_rows, c.num_qo_heads, c.head_dim_qk,
              r.q_stride_token, r.q_stride_head);
  to.k = cache(views, "k", r.k, c.dtype_kv(), c.device, shape, c.head_dim_qk, r.k_stride_page,
               r.k_stride_token, r.k_stride_head);
  to.v = cache(views, "v", r.v, c.dtype_kv(), c.device, shape, c.head_dim_vo, r.v_stride_page,
               r.v_stride_token, r.v_stride_head);
  to.out = rows(views, "out", r.out, c.dtype, c.device, r.num_rows, c.num_qo_heads, c.head_dim_vo,
                r.out_stride_token, r.out_stride_head);
  if (r.lse != nullptr) {
    to.lse = views.floats("lse", r.lse, Dtype::kFloat32, c.device, {r.num_rows, c.num_qo_heads},
                          {r.lse_stride_token, r.lse_stride_head});
  }
  to.sm_scale = r.sm_scale;
  to.k_scale = r.k_scale;
  to.v_scale = r.v_scale;
  to.variant_args = params_from(views, r, c.device);
  a->attention.run(to, stream);
}

void merge(const plait_merge_args* args, void* stream) {
  check_struct("plait_merge_args", args);
  const plait_merge_args& m = *args;
  const Dtype dtype = dtype_from("plait_merge_args", m.dtype);
  const Device device{m.device_type, m.device_id};
  Views views("plait_merge_states");
  const bool dense = m.v_stride_row == 0 && m.v_stride_state == 0 && m.v_stride_head == 0;
  const TensorView v =
      views.floats("v", m.v, dtype, device, {m.num_rows, m.num_states, m.num_heads, m.head_dim},
                   {m.v_stride_row, m.v_stride_state, m.v_stride_head, dense ? 0 : 1});
  const TensorView lse =
      views.floats("lse", m.lse, Dtype::kFloat32, device, {m.num_rows, m.num_states, m.num_heads},
                   {m.lse_stride_row, m.lse_stride_state, m.lse_stride_head});
  const TensorView out = rows(views, "out", m.out, dtype, device, m.num_rows, m.num_heads,
                              m.head_dim, m.out_stride_row, m.out_stride_head);
  const TensorView out_lse =
      views.floats("out_lse", m.out_lse, Dtype::kFloat32, device, {m.num_rows, m.num_heads},
                   {m.out_lse_stride_row, m.out_lse_stride_head});
  merge_states(v, lse, out, out_lse, stream);
}

void append(const plait_append_args* args, void* stream) {
  check_struct("plait_append_args", args);
  const plait_append_args& a = *args;
  const Dtype dtype = dtype_from("plait_append_args", a.dtype);
  const Dtype dtype_kv = kv_dtype_from("plait_append_args", a.kv_dtype, dtype);
  const Device host, device{a.device_type, a.device_id};
  check(a.num_requests >= 0, "plait_append_args: num_requests is ", a.num_requests,
        "; it must be >= 0");
  const CacheShape shape{a.kv_kind == PLAIT_RAGGED, a.hnd != 0, a.num_kv_blocks, a.page_size,
                         a.num_kv_heads};
  Views views("plait_append_kv");
  AppendArgs to;
  to.kv = format_from("plait_append_args", a.kv_kind, a.page_size, a.hnd, 1);
  to.k_new = rows(views, "k_new", a.k_new, dtype, device, a.num_tokens, a.num_kv_heads,
                  a.head_dim_qk, a.k_new_stride_token, a.k_new_stride_head);
  to.v_new = rows(views, "v_new", a.v_new, dtype, device, a.num_tokens, a.num_kv_heads,
                  a.head_dim_vo, a.v_new_stride_token, a.v_new_stride_head);
  to.k_cache = cache(views, "k_cache", a.k_cache, dtype_kv, device, shape, a.head_dim_qk,
                     a.k_stride_page, a.k_stride_token, a.k_stride_head);
  to.v_cache = cache(views, "v_cache", a.v_cache, dtype_kv, device, shape, a.head_dim_vo,
                     a.v_stride_page, a.v_stride_token, a.v_stride_head);
  const Device& place = a.places_on_device ? device : host;
  const bool nowhere = a.num_tokens == 0 && a.batch_indices == nullptr;
  const int64_t* slots = a.slot_mapping == nullptr && nowhere ? kNoSlots : a.slot_mapping;
  to.slot_mapping = views.ints("slot_mapping", slots, place, {a.num_tokens});
  to.batch_indices = views.ints("batch_indices", a.batch_indices, place, {a.num_tokens});
  to.positions = views.ints("positions", a.positions, place, {a.num_tokens});
  to.tables = tables_from(views, a.tables, a.num_requests, device);
  to.k_scale = a.k_scale;
  to.v_scale = a.v_scale;
  append_kv(to, stream);
}

}  // namespace
}  // namespace plait

extern "C" {

const char* plait_last_error(void) { return plait::last_error.c_str(); }
const char* plait_version(void) { return PLAIT_VERSION; }

void plait_config_init(plait_config* config) {
  if (config == nullptr) return;
  plait::init(config);
  config->dtype = PLAIT_BFLOAT16;
  config->kv_dtype = PLAIT_AS_DTYPE;
  config->device_type = PLAIT_CPU;
  config->page_size = 1;
  config->num_levels = 1;
  config->window_left = -1;
  const plait::RopeOptions rope;
  config->rope_theta = rope.theta;
  config->rope_scale = rope.scale;
  config->rope_low_freq_factor = rope.low_freq_factor;
  config->rope_high_freq_factor = rope.high_freq_factor;
}
void plait_kv_tables_init(plait_kv_tables* tables) { plait::init(tables); }
void plait_radix_args_init(plait_radix_args* args) {
  if (args == nullptr) return;
  plait::init(args);
  plait::init(&args->tables);
}
void plait_batch_init(plait_batch* batch) {
  if (batch == nullptr) return;
  plait::init(batch);
  plait::init(&batch->kv);
}
void plait_run_args_init(plait_run_args* args) {
  if (args == nullptr) return;
  plait::init(args);
  args->k_scale = args->v_scale = 1;
}
void plait_merge_args_init(plait_merge_args* args) {
  if (args == nullptr) return;
  plait::init(args);
  args->dtype = PLAIT_BFLOAT16;
  args->device_type = PLAIT_CPU;
}
void plait_append_args_init(plait_append_args* args) {
  if (args == nullptr) return;
  plait::init(args);
  plait::init(&args->tables);
  args->dtype = PLAIT_BFLOAT16;
  args->kv_dtype = PLAIT_AS_DTYPE;
  args->k_scale = args->v_scale = 1;
  args->device_type = PLAIT_CPU;
  args->page_size = 1;
}

plait_status plait_workspace_bytes(const plait_config* config, int64_t* bytes) {
  return plait::guarded([&] {
    plait::check(bytes != nullptr, "plait_workspace_bytes: bytes is NULL");
    *bytes = plait::workspace_bytes(plait::config_from(config));
  });
}

plait_status plait_attention_create(const plait_config* config, plait_attention** attention) {
  return plait::guarded([&] {
    plait::check(attention != nullptr, "plait_attention_create: attention is NULL");
    const plait::AttentionConfig from = plait::config_from(config);
    *attention = new plait_attention(from, plait::workspace_from(*config));
  });
}

void plait_attention_destroy(plait_attention* attention) { delete attention; }

const char* plait_kernel_name(const plait_attention* attention) {
  return attention == nullptr ? "" : attention->kernel_name.c_str();
}

plait_status plait_compose_radix(const plait_attention* attention, const plait_radix_args* args,
                                 plait_levels** levels) {
  return plait::guarded([&] {
    plait::check(levels != nullptr, "plait_compose_radix: levels is NULL");
    *levels = plait::compose(attention, args);
  });
}

void plait_levels_destroy(plait_levels* levels) { delete levels; }

const char* plait_explain(plait_attention* attention, int32_t json) {
  const char* text = nullptr;
  plait::guarded([&] {
    plait::check(attention != nullptr, "plait_explain: attention is NULL");
    const plait::Plan& plan = attention->attention.current_plan();
    attention->explanation = json ? plait::explain_json(plan) : plait::explain(plan);
    text = attention->explanation.c_str();
  });
  return text;
}

plait_status plait_plan(plait_attention* attention, const plait_batch* batch, void* stream) {
  return plait::guarded([&] { plait::plan(attention, batch, stream); });
}

plait_status plait_run(plait_attention* attention, const plait_run_args* args, void* stream) {
  return plait::guarded([&] { plait::run(attention, args, stream); });
}

plait_status plait_merge_states(const plait_merge_args* args, void* stream) {
  return plait::guarded([&] { plait::merge(args, stream); });
}

plait_status plait_append_kv(const plait_append_args* args, void* stream) {
  return plait::guarded([&] { plait::append(args, stream); });
}

}  // extern "C"
