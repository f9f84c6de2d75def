// merge_states and merge_state: the checks before the executors' kernels.
#include "executor.h"
#include "plait/attention.h"
#include "plait/error.h"
#include "tensor_checks.h"

namespace plait {
namespace {

Dtype checked_dtype(const char* name, const TensorView& v) {
  check(v.defined(), name, " is missing");
  const Dtype dtype = dtype_of(v, name);
  check(size_of(dtype) > 1, name, " is ", Shown{v}, "; states are float32, bfloat16 or float16");
  const int device_type = v.device().type;
  check(device_type == kCpu || device_type == kCuda, name, " is ", Shown{v},
        "; plait runs on cpu and cuda");
  return dtype;
}

void check_outputs(const char* where, const TensorView& out, const TensorView& out_lse, Dtype dtype,
                   const Device& device, int64_t rows, int64_t heads, int64_t dim) {
  const TensorName out_of{where, "out"}, lse_of{where, "out_lse"};
  check_tensor(out_of, out, 3, dtype, device);
  check_shape(out_of, out, {rows, heads, dim}, "rows, num_heads, dim");
  check_last_dense(out_of, out);
  check_no_overlap(out_of, out);
  check_tensor(lse_of, out_lse, 2, Dtype::kFloat32, device);
  check_shape(lse_of, out_lse, {rows, heads}, "rows, num_heads");
  check_no_overlap(lse_of, out_lse);
  check_apart(out_of, out, "out_lse", out_lse);
}

// Outputs lie apart from an input; in place, where it is taken, is that input's own memory, element
// on element: a shifted one would be read after it was written.
void check_input_apart(const char* where, const char* name, const TensorView& input,
                       const TensorView& out, const TensorView& out_lse, bool in_place) {
  if (!in_place || !same_memory(out, input)) check_apart({where, "out"}, out, name, input);
  if (!in_place || !same_memory(out_lse, input)) {
    check_apart({where, "out_lse"}, out_lse, name, input);
  }
}

void launch(const MergeParams& params, const Device& device, Stream stream) {
  if (params.num_rows == 0 || params.num_heads == 0) return;
  if (device.type == kCuda) {
    cuda_merge_states(params, device, stream);
  } else {
    cpu_merge_states(params);
  }
}

MergeParams shared_params(const TensorView& v, const TensorView& out, const TensorView& out_lse,
                          Dtype dtype, bool lse_base2, const char* where) {
  MergeParams params{};
  params.out = out.bytes();
  params.out_lse = reinterpret_cast<float*>(out_lse.bytes());
  params.out_stride = row_strides(out);
  params.out_lse_stride = row_strides(out_lse);
  params.num_rows = checked_rows({where, "v"}, v.shape[0]);
  params.num_heads = checked_rows({where, "v"}, out.shape[1]);
  params.head_dim = checked_rows({where, "v"}, out.shape[2]);
  if (lse_base2) params.log2_per_lse = params.lse_per_log2 = 1.0f;
  params.dtype = dtype;
  return params;
}

}  // namespace

void merge_states(const TensorView& v, const TensorView& lse, const TensorView& out,
                  const TensorView& out_lse, Stream stream, bool lse_base2) {
  constexpr char kWhere[] = "merge_states";
  const Dtype dtype = checked_dtype("merge_states: v", v);
  const Device device = v.device();
  check_tensor({kWhere, "v"}, v, 4, dtype, device);
  check(v.shape[1] >= 1, kWhere, ": v is ", Shown{v},
        "; it must have at least one state (v.shape[1])");
  check(v.shape[3] >= 1, kWhere, ": v is ", Shown{v}, "; dim must be at least 1 (v.shape[3])");
  check_last_dense({kWhere, "v"}, v);
  check_tensor({kWhere, "lse"}, lse, 3, Dtype::kFloat32, device);
  check_shape({kWhere, "lse"}, lse, {v.shape[0], v.shape[1], v.shape[2]},
              "rows, states, num_heads");
  check_outputs(kWhere, out, out_lse, dtype, device, v.shape[0], v.shape[2], v.shape[3]);
  check_input_apart(kWhere, "v", v, out, out_lse, false);
  check_input_apart(kWhere, "lse", lse, out, out_lse, false);

  MergeParams params = shared_params(v, out, out_lse, dtype, lse_base2, kWhere);
  params.v = v.bytes();
  params.lse = reinterpret_cast<const float*>(lse.bytes());
  params.v_stride_row = stride_of(v, 0);
  params.v_stride_state = stride_of(v, 1);
  params.v_stride_head = stride_of(v, 2);
  params.lse_stride_row = stride_of(lse, 0);
  params.lse_stride_state = stride_of(lse, 1);
  params.lse_stride_head = stride_of(lse, 2);
  params.num_states = checked_rows({kWhere, "v"}, v.shape[1]);
  launch(params, device, stream);
}

// Two tensors are one with two states, if they step alike: the state's stride is the way from one
// to the other.
void merge_state(const TensorView& v_a, const TensorView& lse_a, const TensorView& v_b,
                 const TensorView& lse_b, const TensorView& out, const TensorView& out_lse,
                 Stream stream, bool lse_base2) {
  constexpr char kWhere[] = "merge_state";
  const Dtype dtype = checked_dtype("merge_state: v_a", v_a);
  const Device device = v_a.device();
  check_tensor({kWhere, "v_a"}, v_a, 3, dtype, device);
  check(v_a.shape[2] >= 1, kWhere, ": v_a is ", Shown{v_a},
        "; dim must be at least 1 (v_a.shape[2])");
  check_last_dense({kWhere, "v_a"}, v_a);
  check_tensor({kWhere, "v_b"}, v_b, 3, dtype, device);
  check_shape({kWhere, "v_b"}, v_b, {v_a.shape[0], v_a.shape[1], v_a.shape[2]}, "the shape of v_a");
  check_last_dense({kWhere, "v_b"}, v_b);
  check_tensor({kWhere, "lse_a"}, lse_a, 2, Dtype::kFloat32, device);
  check_shape({kWhere, "lse_a"}, lse_a, {v_a.shape[0], v_a.shape[1]}, "rows, num_heads");
  check_tensor({kWhere, "lse_b"}, lse_b, 2, Dtype::kFloat32, device);
  check_shape({kWhere, "lse_b"}, lse_b, {v_a.shape[0], v_a.shape[1]}, "rows, num_heads");
  check_outputs(kWhere, out, out_lse, dtype, device, v_a.shape[0], v_a.shape[1], v_a.shape[2]);
  const RowStrides a = row_strides(v_a), b = row_strides(v_b);
  const RowStrides lse_a_stride = row_strides(lse_a), lse_b_stride = row_strides(lse_b);
  check(a.token == b.token && a.head == b.head, kWhere, ": v_a has strides [", a.token, ", ",
        a.head, ", 1] and v_b [", b.token, ", ", b.head, ", 1]; they must be equal");
  check(lse_a_stride.token == lse_b_stride.token && lse_a_stride.head == lse_b_stride.head, kWhere,
        ": lse_a has strides [", lse_a_stride.token, ", ", lse_a_stride.head, "] and lse_b [",
        lse_b_stride.token, ", ", lse_b_stride.head, "]; they must be equal");
  check_input_apart(kWhere, "v_a", v_a, out, out_lse, true);
  check_input_apart(kWhere, "v_b", v_b, out, out_lse, true);
  check_input_apart(kWhere, "lse_a", lse_a, out, out_lse, true);
  check_input_apart(kWhere, "lse_b", lse_b, out, out_lse, true);

  MergeParams params = shared_params(v_a, out, out_lse, dtype, lse_base2, kWhere);
  const auto distance = [](const TensorView& from, const TensorView& to, int bytes) {
    return (reinterpret_cast<intptr_t>(to.bytes()) - reinterpret_cast<intptr_t>(from.bytes())) /
           bytes;  // both are aligned to their elements
  };
  params.v = v_a.bytes();
  params.lse = reinterpret_cast<const float*>(lse_a.bytes());
  params.v_stride_row = a.token;
  params.v_stride_state = distance(v_a, v_b, size_of(dtype));
  params.v_stride_head = a.head;
  params.lse_stride_row = lse_a_stride.token;
  params.lse_stride_state = distance(lse_a, lse_b, 4);
  params.lse_stride_head = lse_a_stride.head;
  params.num_states = 2;
  launch(params, device, stream);
}

}  // namespace plait
