#include "formats/index_array.h"

namespace plait {

std::string ArrayName::in_level() const {
  return level < 0 ? array : concat("levels[", level, "].", array);
}
std::string ArrayName::text() const { return concat(where, ": ", in_level()); }

void check_index_tensor(const TensorView& tensor, const ArrayName& name, const Device& device) {
  const bool is_index = tensor.dtype_code == 0 && tensor.dtype_lanes == 1 &&
                        (tensor.dtype_bits == 32 || tensor.dtype_bits == 64);
  if (!is_index) {
    refuse(name.text(), " is ", describe(tensor), "; index arrays are int32 or int64");
  }
  if (!tensor.on_cpu() && tensor.device() != device) {
    refuse(name.text(), " is on ", to_string(tensor.device()), ", but the work is on ",
           to_string(device), "; give it there or on the cpu");
  }
  long long size = 1;
  for (int i = 0; i < tensor.ndim; ++i) size *= tensor.shape[i];
  if (size == 0) return;
  if (tensor.data == nullptr) {
    refuse(name.text(), " is ", describe(tensor), " but its pointer is null");
  }
  const int bytes = tensor.dtype_bits / 8;
  if (reinterpret_cast<uintptr_t>(tensor.bytes()) % bytes != 0) {
    refuse(name.text(), " is not aligned to its ", bytes, "-byte elements");
  }
}

IndexArray::IndexArray(const TensorView& tensor, const ArrayName& name, const Device& device)
    : name_(name) {
  if (!tensor.defined()) {
    // A 0-d tensor has ndim 0 as well, but it has memory.
    if (tensor.data != nullptr) refuse(name.text(), " is a scalar (0-d); it must be 1-D");
    return;
  }
  if (tensor.ndim != 1) refuse(name.text(), " is ", describe(tensor), "; it must be 1-D");
  check_index_tensor(tensor, name, device);
  given_ = true;
  wide_ = tensor.dtype_bits == 64;
  on_host_ = tensor.on_cpu();
  size_ = tensor.shape[0];
  data_ = tensor.bytes();
  stride_bytes_ = size_ > 1 ? tensor.stride(0) * index_bytes() : index_bytes();
}

std::string IndexArray::at(long long i) const { return concat(name_.text(), "[", i, "]"); }

void IndexArray::require_size(long long size, const char* meaning) const {
  if (size_ != size) {
    refuse(name_.text(), " has ", size_, " entries; it must have ", size, " (", meaning, ")");
  }
}

void IndexArray::require_host(long long size, const char* meaning) const {
  if (!given_) refuse(name_.text(), " is missing");
  if (!on_host_) {
    refuse(
        name_.text(), " is on the device; pass ", name_.array,
        " on the host (lengths of flat formats may be on the device if qo_indptr and all tables ",
        "are)");
  }
  require_size(size, meaning);
}

}  // namespace plait
