// GPU memory with a shape: sizes, dtypes and copies checked here, nothing else does.
#include "device_array.h"

#include <algorithm>

#include "plait/error.h"

namespace plait::python {
namespace {

struct Element {
  const char* name;
  uint8_t code, bits;  // DLPack's
};
constexpr Element kElements[] = {
    {"float32", 2, 32},     {"bfloat16", 4, 16}, {"float16", 2, 16}, {"float8_e4m3fn", 10, 8},
    {"float8_e5m2", 12, 8}, {"int32", 0, 32},    {"int64", 0, 64},   {"uint8", 1, 8}};

long long product(const std::vector<int64_t>& shape) {
  long long n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

}  // namespace

DeviceArray::DeviceArray(std::vector<int64_t> shape, const std::string& dtype, const Device& device)
    : shape_(std::move(shape)), dtype_(dtype), device_(device) {
  check(device.type == kCuda, "DeviceArray: device is ", to_string(device), "; a GPU is wanted");
  check(!shape_.empty(), "DeviceArray: shape has no dimension");
  for (const int64_t size : shape_) check(size >= 0, "DeviceArray: shape has a size of ", size);
  const auto element = std::find_if(std::begin(kElements), std::end(kElements),
                                    [&](const Element& e) { return dtype == e.name; });
  check(element != std::end(kElements), "DeviceArray: dtype is '", dtype,
        "'; taken are float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int32, int64, uint8");
  code_ = element->code;
  bits_ = element->bits;
  memory_ = std::shared_ptr<void>(device_alloc(device, bytes()),
                                  [device](void* data) { device_free(device, data); });
  data_ = memory_.get();
}

long long DeviceArray::bytes() const { return product(shape_) * (bits_ / 8); }

TensorView DeviceArray::view() {
  return {data_,         kCuda,   device_.id, int32_t(shape_.size()), code_, bits_, 1,
          shape_.data(), nullptr, 0};
}

DeviceArray DeviceArray::rows(int64_t begin, int64_t end) const {
  check(0 <= begin && begin <= end && end <= shape_[0], "DeviceArray: rows ", begin, " to ", end,
        " of ", shape_[0]);
  DeviceArray part = *this;
  part.shape_[0] = end - begin;
  const long long row_bytes = shape_[0] == 0 ? 0 : bytes() / shape_[0];
  part.data_ = static_cast<char*>(data_) + begin * row_bytes;
  return part;
}

DeviceArray DeviceArray::reshape(std::vector<int64_t> shape) const {
  bool fits = !shape.empty() && product(shape) == product(shape_);
  for (const int64_t size : shape) fits = fits && size >= 0;
  check(fits, "DeviceArray: reshape keeps the ", product(shape_), " elements, not ",
        shape.empty() ? 0 : product(shape));
  DeviceArray other = *this;
  other.shape_ = std::move(shape);
  return other;
}

void DeviceArray::copy_from(const TensorView& host, Stream stream) {
  check(host.on_cpu(), "DeviceArray: copies from the host, not from ", describe(host));
  bool equal = host.ndim == int32_t(shape_.size());
  for (int i = 0; equal && i < host.ndim; ++i) equal = host.shape[i] == shape_[i];
  check(equal, "DeviceArray: the array to copy is ", describe(host), ", not of this array's shape");
  // What NumPy has not: bfloat16, float8.
  const bool as_bits = (code_ == 4 || code_ == 10 || code_ == 12) && host.dtype_code == 1;
  check(host.dtype_bits == bits_ && (host.dtype_code == code_ || as_bits),
        "DeviceArray: the array to copy is ", describe(host), ", not ", dtype_);
  int64_t stride = 1;
  for (int i = host.ndim - 1; i >= 0; --i) {
    check(host.shape[i] <= 1 || host.stride(i) == stride,
          "DeviceArray: the array to copy is not contiguous");
    stride *= host.shape[i];
  }
  copy_to_device(device_, data_, host.bytes(), bytes(), stream);
}

void DeviceArray::copy_to(void* host, Stream stream) const {
  copy_to_host(device_, host, data_, bytes(), stream);
}

}  // namespace plait::python
