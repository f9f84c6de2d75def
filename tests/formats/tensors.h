// Host tensors for the C++ tests: memory, shape and strides in one object, seen as a TensorView.
#pragma once
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/error.h"
#include "plait/tensor.h"

namespace plait::test {

template <class T>
class HostTensor {
 public:
  HostTensor() = default;
  // Copied, never moved: assigning values of the same shape leaves earlier views valid.
  HostTensor(const HostTensor&) = default;
  HostTensor& operator=(const HostTensor&) = default;
  HostTensor(std::vector<int64_t> shape, std::vector<T> data)
      : data_(std::move(data)), shape_(std::move(shape)), strides_(shape_.size(), 1) {
    for (int i = static_cast<int>(shape_.size()) - 2; i >= 0; --i) {
      strides_[i] = strides_[i + 1] * shape_[i + 1];
    }
  }
  // 1-D, with `step - 1` junk entries after each.
  static HostTensor list(const std::vector<T>& values, int step = 1, T junk = T{}) {
    HostTensor t({static_cast<int64_t>(values.size())}, std::vector<T>(values.size() * step, junk));
    for (size_t i = 0; i < values.size(); ++i) t.data_[i * step] = values[i];
    t.strides_[0] = step;
    return t;
  }
  static HostTensor full(std::vector<int64_t> shape, T value) {
    int64_t size = 1;
    for (const int64_t s : shape) size *= s;
    return HostTensor(std::move(shape), std::vector<T>(size, value));
  }

  TensorView view() {
    TensorView v;
    v.data = data_.empty() ? nullptr : data_.data();
    v.ndim = static_cast<int32_t>(shape_.size());
    v.dtype_code = std::is_floating_point_v<T> ? 2 : std::is_signed_v<T> ? 0 : 1;
    v.dtype_bits = sizeof(T) * 8;
    v.shape = shape_.data();
    v.strides = strides_.data();
    return v;
  }
  std::vector<T>& data() { return data_; }
  std::vector<int64_t>& shape() { return shape_; }
  std::vector<int64_t>& strides() { return strides_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  std::vector<T> data_;
  std::vector<int64_t> shape_, strides_;
};

using Ints = HostTensor<int32_t>;
using Longs = HostTensor<int64_t>;
using Floats = HostTensor<float>;

// The message of the ArgumentError that f throws; "" if it throws none.
template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "";
}

}  // namespace plait::test
