// Names of dtypes and devices, and descriptions of tensors for error texts.
#include "plait/tensor.h"

#include "plait/error.h"

namespace plait {

std::string to_string(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kBfloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kE4m3:
      return "float8_e4m3fn";
    case Dtype::kE5m2:
      return "float8_e5m2";
  }
  return concat("dtype ", static_cast<int>(dtype));
}

std::string to_string(const Device& device) {
  if (device.type == kCpu || device.type == kCudaHost) return "cpu";
  if (device.type == kCuda) return concat("cuda:", device.id);
  return concat("device ", device.id, " of DLPack type ", device.type);
}

static std::string dtype_name(const TensorView& tensor) {
  // DLPack's type codes; 10 and 12 are e4m3fn and e5m2.
  const int code = tensor.dtype_code, bits = tensor.dtype_bits;
  std::string name;
  switch (code) {
    case 0:
      name = concat("int", bits);
      break;
    case 1:
      name = concat("uint", bits);
      break;
    case 2:
      name = concat("float", bits);
      break;
    case 4:
      name = concat("bfloat", bits);
      break;
    case 5:
      name = concat("complex", bits);
      break;
    case 6:
      name = "bool";
      break;
    case 10:
      name = "float8_e4m3fn";
      break;
    case 12:
      name = "float8_e5m2";
      break;
    default:
      name = concat("dtype code ", code, " of ", bits, " bits");
  }
  return tensor.dtype_lanes == 1 ? name : concat(name, "x", tensor.dtype_lanes);
}

std::string describe(const TensorView& tensor) {
  if (!tensor.defined() && tensor.data == nullptr) return "not given";
  std::string text = dtype_name(tensor) + "[";
  for (int i = 0; i < tensor.ndim; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.shape[i]);
  }
  return text + "] on " + to_string(tensor.device());
}

Dtype parse_dtype(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  if (name == "float8_e4m3fn") return Dtype::kE4m3;
  if (name == "float8_e5m2") return Dtype::kE5m2;
  check(false, "dtype is '", name,
        "'; plait takes float32, bfloat16, float16 and, of K and V, float8_e4m3fn and "
        "float8_e5m2");
  return {};
}

Dtype dtype_of(const TensorView& tensor, const char* name) {
  const int code = tensor.dtype_code, bits = tensor.dtype_bits;
  if (tensor.dtype_lanes == 1) {
    if (code == 2 && bits == 32) return Dtype::kFloat32;
    if (code == 2 && bits == 16) return Dtype::kFloat16;
    if ((code == 4 || code == 1) && bits == 16) return Dtype::kBfloat16;
    if (code == 10 && bits == 8) return Dtype::kE4m3;
    if (code == 12 && bits == 8) return Dtype::kE5m2;
  }
  check(false, name, " is ", dtype_name(tensor),
        "; plait takes float32, bfloat16 (or its bits as uint16) and float16");
  return {};
}

}  // namespace plait
