#include "tensor_checks.h"

#include <algorithm>
#include <climits>
#include <cmath>

namespace plait {
namespace {

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += size < 0 ? "any" : std::to_string(size);
  }
  return text + "]";
}

bool is_dtype(const TensorView& tensor, Dtype dtype) {
  if (tensor.dtype_lanes != 1) return false;
  const int code = tensor.dtype_code, bits = tensor.dtype_bits;
  switch (dtype) {
    case Dtype::kFloat32:
      return code == 2 && bits == 32;
    case Dtype::kFloat16:
      return code == 2 && bits == 16;
    case Dtype::kBfloat16:
      return (code == 4 || code == 1) && bits == 16;
    case Dtype::kE4m3:
      return (code == 10 || code == 1) && bits == 8;
    case Dtype::kE5m2:
      return (code == 12 || code == 1) && bits == 8;
  }
  return false;
}

int64_t num_elements(const TensorView& tensor) {
  int64_t n = 1;
  for (int i = 0; i < tensor.ndim; ++i) n *= tensor.shape[i];
  return n;
}

int64_t element_bytes(const TensorView& tensor) {
  return (int64_t{tensor.dtype_bits} * tensor.dtype_lanes + 7) / 8;
}

// Steps of a tensor in bytes, those that are taken.
struct Step {
  int64_t bytes, last;  // last: index of the last element
};
constexpr int kMaxSteps = 8;  // K and V have 5 dimensions, a variant's tensors few
int steps_of(const TensorView& tensor, Step* steps) {
  int n = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] <= 1) continue;
    steps[n++] = {tensor.stride(i) * element_bytes(tensor), tensor.shape[i] - 1};
  }
  return n;
}

// The bytes [begin, begin + size) that hold a tensor; with a period, those that hold all of it
// modulo the period: steps of whole periods do not count.
struct Span {
  uint64_t begin, size;
};
Span span_of(const TensorView& tensor, const Step* steps, int num_steps, int64_t period = 0) {
  Span span{reinterpret_cast<uintptr_t>(tensor.bytes()),
            static_cast<uint64_t>(element_bytes(tensor))};
  for (int i = 0; i < num_steps; ++i) {
    if (period != 0 && steps[i].bytes % period == 0) continue;
    const int64_t way = steps[i].bytes * steps[i].last;
    if (way < 0) span.begin += way;
    span.size += way < 0 ? -way : way;
  }
  return span;
}

bool apart_modulo(const Span& a, const Span& b, int64_t signed_period) {
  const uint64_t period = signed_period;
  if (a.size > period || b.size > period) return false;
  const uint64_t way = (b.begin % period + period - a.begin % period) % period;  // from a up to b
  return way >= a.size && way + b.size <= period;
}

}  // namespace

void check_tensor(const TensorName& name, const TensorView& tensor, int ndim, Dtype dtype,
                  const Device& device) {
  if (!tensor.defined()) [[unlikely]] {
    check(tensor.data == nullptr, name, " is a scalar (0-d); it must have ", ndim, " dimensions");
    check(false, name, " is missing");
  }
  if (tensor.ndim != ndim) [[unlikely]] {
    check(false, name, " is ", Shown{tensor}, "; it must have ", ndim, " dimensions");
  }
  if (!is_dtype(tensor, dtype)) [[unlikely]] {
    check(false, name, " is ", Shown{tensor}, "; its dtype must be ", to_string(dtype),
          dtype == Dtype::kBfloat16 ? " (or its bits as uint16)"
          : size_of(dtype) == 1     ? " (or its bits as uint8)"
                                    : "");
  }
  if (tensor.device() != device) [[unlikely]] {
    check(false, name, " is on ", to_string(tensor.device()), ", but the work is on ",
          to_string(device), "; all tensors of a call must be there");
  }
  if (num_elements(tensor) == 0) return;
  if (tensor.data == nullptr) [[unlikely]] {
    check(false, name, " is ", Shown{tensor}, " but its pointer is null");
  }
  const int bytes = size_of(dtype);
  if (reinterpret_cast<uintptr_t>(tensor.bytes()) % bytes != 0) [[unlikely]] {
    check(false, name, " starts at ", static_cast<const void*>(tensor.bytes()),
          "; it must be aligned to its ", bytes, "-byte elements");
  }
}

void check_shape(const TensorName& name, const TensorView& tensor,
                 std::initializer_list<int64_t> shape, const char* meaning) {
  bool equal = static_cast<size_t>(tensor.ndim) == shape.size();
  for (int i = 0; equal && i < tensor.ndim; ++i) {
    equal = shape.begin()[i] < 0 || tensor.shape[i] == shape.begin()[i];
  }
  if (!equal) [[unlikely]] {
    check(false, name, " is ", Shown{tensor}, "; its shape must be ", shape_text(shape), " (",
          meaning, ")");
  }
}

int64_t stride_of(const TensorView& tensor, int dim) {
  if (tensor.strides != nullptr && tensor.shape[dim] > 1) return tensor.strides[dim];
  int64_t stride = 1;
  for (int i = tensor.ndim - 1; i > dim; --i) {
    // What lies inside, as it lies; a dense tensor gives the product of its sizes.
    if (tensor.strides != nullptr && tensor.shape[i] > 1) {
      const int64_t inner = tensor.strides[i];
      stride = std::max(stride, (inner < 0 ? -inner : inner) * tensor.shape[i]);
    } else {
      stride *= tensor.shape[i];
    }
  }
  return stride;
}

void check_last_dense(const TensorName& name, const TensorView& tensor) {
  const int last = tensor.ndim - 1;
  if (tensor.shape[last] > 1 && tensor.stride(last) != 1) [[unlikely]] {
    if (num_elements(tensor) == 0) return;  // NumPy gives empty arrays strides of 0
    check(false, name, " has stride ", tensor.stride(last), " in its last dimension; it must be 1");
  }
}

void check_no_overlap(const TensorName& name, const TensorView& tensor) {  // at most 5-D
  // Sorted by stride, each dimension must step over all that the smaller ones span.
  struct Dim {
    int64_t stride, size;
  } dims[5];
  int n = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return;
    if (tensor.shape[i] == 1) continue;
    const int64_t stride = tensor.stride(i);
    const Dim dim{stride < 0 ? -stride : stride, tensor.shape[i]};
    int at = n++;
    for (; at > 0 && dims[at - 1].stride > dim.stride; --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }
  int64_t span = 1;
  for (int i = 0; i < n; ++i) {
    if (dims[i].stride < span) [[unlikely]] {
      check(false, name, " is written, but elements of ", Shown{tensor},
            " share memory: a stride of ", dims[i].stride, " steps into the ", span,
            " elements before it");
    }
    span += dims[i].stride * (dims[i].size - 1);
  }
}

void check_apart(const TensorName& written, const TensorView& tensor, const char* other_name,
                 const TensorView& other) {
  if (!tensor.defined() || !other.defined()) return;
  if (num_elements(tensor) == 0 || num_elements(other) == 0) return;
  if (tensor.ndim > kMaxSteps || other.ndim > kMaxSteps) [[unlikely]] {
    check(false, written.where, ": ", other_name, " is ", Shown{other}, "; at most ", kMaxSteps,
          " dimensions are taken");
  }
  Step steps[2 * kMaxSteps];
  const int n = steps_of(tensor, steps);
  Step* const other_steps = steps + n;
  const int m = steps_of(other, other_steps);
  const Span a = span_of(tensor, steps, n), b = span_of(other, other_steps, m);
  if (a.begin + a.size <= b.begin || b.begin + b.size <= a.begin) return;
  for (int i = 0; i < n + m; ++i) {  // interleaved: apart modulo one of the steps
    const int64_t period = steps[i].bytes < 0 ? -steps[i].bytes : steps[i].bytes;
    if (period == 0) continue;
    if (apart_modulo(span_of(tensor, steps, n, period), span_of(other, other_steps, m, period),
                     period)) {
      return;
    }
  }
  check(false, written, " and ", other_name, " share memory: ", written.tensor, " is ",
        Shown{tensor}, " from ", reinterpret_cast<const void*>(a.begin), ", ", a.size, " bytes; ",
        other_name, " is ", Shown{other}, " from ", reinterpret_cast<const void*>(b.begin), ", ",
        b.size, " bytes; ", written.tensor, " is written and must be apart");
}

bool same_memory(const TensorView& a, const TensorView& b) {
  if (a.bytes() != b.bytes() || a.ndim != b.ndim || element_bytes(a) != element_bytes(b)) {
    return false;
  }
  for (int i = 0; i < a.ndim; ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.stride(i) != b.stride(i))) return false;
  }
  return true;
}

int checked_rows(const TensorName& name, int64_t rows) {
  check(rows <= INT_MAX, name, " has ", rows, " rows; fewer than 2^31 are taken");
  return static_cast<int>(rows);
}

void check_scale(const TensorName& name, float scale, bool taken) {
  check(std::isfinite(scale) && scale > 0, name, " is ", scale, "; it must be finite and > 0");
  check(taken || scale == 1, name, " is ", scale,
        "; only numbers in float8_e4m3fn and float8_e5m2 have a scale");
}

void check_num_levels(const char* name, int num_levels) {
  check(num_levels >= 1 && num_levels <= kMaxLevels, name, " is ", num_levels,
        "; it must be 1 ... ", kMaxLevels,
        " (of a deeper tree compose_radix shares the nodes that save most)");
}

void check_format(const char* where, const KvFormat& format) {
  check(format.kind == KvFormat::kRagged || format.kind == KvFormat::kPaged, where, ": kv.kind is ",
        static_cast<int>(format.kind), "; it must be ragged (0) or paged (1)");
  check_num_levels(concat(where, ": kv.num_levels").c_str(), format.num_levels);
  if (format.kind == KvFormat::kRagged) {
    check(format.page_size == 1, where, ": kv.page_size is ", format.page_size,
          ", but a ragged format has no pages; leave it 1");
    check(!format.hnd, where, ": kv.hnd is set, but a ragged format has no pages");
  }
  check(format.page_size >= 1, where, ": kv.page_size is ", format.page_size, "; it must be >= 1");
}

KvTensors check_kv(const char* where, const char* k_name, const char* v_name,
                   const KvFormat& format, const TensorView& k, const TensorView& v, Dtype dtype,
                   const Device& device, int num_kv_heads, int head_dim_qk, int head_dim_vo) {
  const TensorName k_of{where, k_name}, v_of{where, v_name};
  const int64_t heads = num_kv_heads, page = format.page_size;
  const bool hnd = format.hnd;
  KvTensors kv{};
  if (format.kind == KvFormat::kRagged) {
    check_tensor(k_of, k, 3, dtype, device);
    check_shape(k_of, k, {-1, heads, head_dim_qk}, "rows, num_kv_heads, head_dim_qk");
    check_tensor(v_of, v, 3, dtype, device);
    check_shape(v_of, v, {k.shape[0], k.shape[1], head_dim_vo}, "rows, num_kv_heads, head_dim_vo");
    check_last_dense(k_of, k);
    check_last_dense(v_of, v);
    kv.k_stride = {0, stride_of(k, 0), stride_of(k, 1)};
    kv.v_stride = {0, stride_of(v, 0), stride_of(v, 1)};
    kv.k = k.bytes();
    kv.v = v.bytes();
    kv.num_blocks = k.shape[0];
    return kv;
  }
  const int token = hnd ? 1 : 0, head = hnd ? 0 : 1;  // order within a page
  if (k.ndim == 5) {                                  // K and V in one
    if (v.defined()) [[unlikely]] {
      check(false, where, ": ", v_name, " is given beside ", Shown{k},
            ", which holds K and V; leave it out");
    }
    check_tensor(k_of, k, 5, dtype, device);
    if (hnd) {
      check_shape(k_of, k, {-1, 2, heads, page, head_dim_qk},
                  "pages, K and V, num_kv_heads, page_size, head_dim");
    } else {
      check_shape(k_of, k, {-1, 2, page, heads, head_dim_qk},
                  "pages, K and V, page_size, num_kv_heads, head_dim");
    }
    if (head_dim_qk != head_dim_vo) [[unlikely]] {
      check(false, where, ": ", k_name, " holds K and V in one tensor, so head_dim_qk ",
            head_dim_qk, " and head_dim_vo ", head_dim_vo, " must be equal; give two tensors");
    }
    check_last_dense(k_of, k);
    kv.k_stride = {stride_of(k, 0), stride_of(k, 2 + token), stride_of(k, 2 + head)};
    kv.v_stride = kv.k_stride;
    kv.k = k.bytes();
    kv.num_blocks = k.shape[0];
    kv.v = kv.num_blocks > 0 ? kv.k + stride_of(k, 1) * size_of(dtype) : kv.k;
    return kv;
  }
  const auto check_pages = [&](const TensorName& name, const TensorView& t, int64_t pages,
                               int64_t h, int64_t dim) {
    check_tensor(name, t, 4, dtype, device);
    if (hnd) {
      check_shape(name, t, {pages, h, page, dim}, "pages, num_kv_heads, page_size, head_dim");
    } else {
      check_shape(name, t, {pages, page, h, dim}, "pages, page_size, num_kv_heads, head_dim");
    }
    check_last_dense(name, t);
  };
  check_pages(k_of, k, -1, heads, head_dim_qk);
  check_pages(v_of, v, k.shape[0], k.shape[1 + head], head_dim_vo);
  kv.k_stride = {stride_of(k, 0), stride_of(k, 1 + token), stride_of(k, 1 + head)};
  kv.v_stride = {stride_of(v, 0), stride_of(v, 1 + token), stride_of(v, 1 + head)};
  kv.k = k.bytes();
  kv.v = v.bytes();
  kv.num_blocks = k.shape[0];
  return kv;
}

}  // namespace plait
