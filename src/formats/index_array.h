// IndexArray: an index array as a caller gives it (int32 or int64, any stride, host or device),
// checked once and then read at full speed. Used by the formats and by append_kv.
#pragma once
#include <string>

#include "plait/error.h"
#include "plait/tensor.h"

namespace plait {

template <class... Parts>
[[noreturn]] void refuse(
    const Parts&... parts) {  // off the fast path: parts are not evaluated there
  throw ArgumentError(concat(parts...));
}

// How errors name an array: "plan: levels[1].kv_len"; level < 0: "plan: kv_len".
struct ArrayName {
  const char* where;  // "plan", "append_kv"
  const char* array;
  int level = -1;
  std::string text() const;      // "plan: levels[1].kv_len"
  std::string in_level() const;  // "levels[1].kv_len"
};

class IndexArray {
 public:
  IndexArray() = default;  // not given
  // Takes a 1-D int32 or int64 array on the host or on `device`; undefined: not given. Throws
  // ArgumentError naming the array and what it is otherwise.
  IndexArray(const TensorView& tensor, const ArrayName& name, const Device& device);

  bool given() const { return given_; }
  bool on_host() const { return on_host_; }
  long long size() const { return size_; }
  long long operator[](long long i) const {  // host only
    const char* p = data_ + i * stride_bytes_;
    return wide_ ? *reinterpret_cast<const int64_t*>(p) : *reinterpret_cast<const int32_t*>(p);
  }
  const char* data() const { return data_; }
  long long stride() const { return stride_bytes_ / index_bytes(); }  // in elements
  int index_bytes() const { return wide_ ? 8 : 4; }
  const ArrayName& name() const { return name_; }
  std::string at(long long i) const;  // "plan: kv_len[3]"

  // Throws unless the array is given, on the host and has `size` entries; `meaning` explains size.
  void require_host(long long size, const char* meaning) const;
  void require_size(long long size, const char* meaning) const;

 private:
  const char* data_ = nullptr;
  long long stride_bytes_ = 4, size_ = 0;
  bool wide_ = false, given_ = false, on_host_ = true;
  ArrayName name_{"", ""};
};

// The checks of any index tensor: dtype, device, memory and alignment.
void check_index_tensor(const TensorView& tensor, const ArrayName& name, const Device& device);

}  // namespace plait
