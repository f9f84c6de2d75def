// What run(), merge_states() and append_kv() ask of the tensors they are given, before anything is
// written or launched: shape, dtype, device, memory, alignment, strides. Errors name the tensor.
#pragma once
#include "host_device/config.h"
#include "plait/error.h"
#include "plait/kv_format.h"
#include "plait/tensor.h"

namespace plait {

inline int size_of(Dtype dtype) {
  return dtype == Dtype::kFloat32                                ? 4
         : dtype == Dtype::kBfloat16 || dtype == Dtype::kFloat16 ? 2
                                                                 : 1;
}

// How an error names a tensor and its place: "run: k_cache".
struct TensorName {
  const char *where, *tensor;
};
// Texts that are only made if an error is: check() streams its parts when it throws.
inline std::ostream& operator<<(std::ostream& os, const TensorName& name) {
  return os << name.where << ": " << name.tensor;
}
struct Shown {
  const TensorView& tensor;
};
inline std::ostream& operator<<(std::ostream& os, const Shown& shown) {
  return os << describe(shown.tensor);
}

// A tensor of `dtype` and `ndim` dimensions on `device`, with memory aligned to its elements.
void check_tensor(const TensorName& name, const TensorView& tensor, int ndim, Dtype dtype,
                  const Device& device);
// tensor.shape == shape; -1 takes any size. `meaning` names the dimensions: "[rows, heads, dim]".
void check_shape(const TensorName& name, const TensorView& tensor,
                 std::initializer_list<int64_t> shape, const char* meaning);
// The elements of a row lie one after the other.
void check_last_dense(const TensorName& name, const TensorView& tensor);
// No element of an output may be two (rows broadcast by stride 0, or overlapping).
void check_no_overlap(const TensorName& name, const TensorView& tensor);
// What is written shares no byte with another tensor of the call, on the same device. Slices that
// interleave without touching, as q, k, v and out of one [tokens, heads, dim], are apart. An
// undefined or empty tensor is apart from everything.
void check_apart(const TensorName& written, const TensorView& tensor, const char* other_name,
                 const TensorView& other);
// Element on element the same memory: what in place means.
bool same_memory(const TensorView& a, const TensorView& b);

// The stride of a dimension; of one that is never stepped, what it would be in a dense tensor, as
// frameworks leave any value there.
int64_t stride_of(const TensorView& tensor, int dim);
inline RowStrides row_strides(const TensorView& tensor) {
  return {stride_of(tensor, 0), stride_of(tensor, 1)};
}

// K and V of a format, given as two tensors or as one with 5 dimensions.
struct KvTensors {
  char *k, *v;
  KvStrides k_stride, v_stride;
  long long num_blocks;  // pages; ragged: rows
};
KvTensors check_kv(const char* where, const char* k_name, const char* v_name,
                   const KvFormat& format, const TensorView& k, const TensorView& v, Dtype dtype,
                   const Device& device, int num_kv_heads, int head_dim_qk, int head_dim_vo);

// A k_scale or v_scale; `taken`: K and V are numbers of 8 bits, others have scale 1.
void check_scale(const TensorName& name, float scale, bool taken);
void check_num_levels(const char* name, int num_levels);
// The format itself: page size, levels.
void check_format(const char* where, const KvFormat& format);
// A number of rows that fits an int.
int checked_rows(const TensorName& name, int64_t rows);

}  // namespace plait
