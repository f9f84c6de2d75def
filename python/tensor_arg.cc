// Tensor arguments in three ways, the fast ones first; streams as torch, CUDA or an integer give
// them.
#include "tensor_arg.h"

#include <string>
#include <unordered_map>

#include "device_array.h"

namespace plait::python {
namespace {

// DLPack 1.2's table of C functions, a capsule on the tensor's type.
struct ExchangeApi {
  uint32_t major, minor;
  const void* older;
  void *allocate, *from_object, *to_object;
  int (*borrow)(void* object, TensorView* out);  // TensorView is DLPack's DLTensor, field for field
  int (*current_stream)(int device_type, int32_t device_id, void** out);
};

const ExchangeApi* exchange_api(PyTypeObject* type) {  // asked once a type
  static std::unordered_map<PyTypeObject*, const ExchangeApi*> known;
  if (const auto it = known.find(type); it != known.end()) return it->second;
  nb::object capsule =
      nb::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", nb::none());
  const ExchangeApi* api = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  }
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // its address is a key now
  return known[type] = api && api->major == 1 && api->borrow ? api : nullptr;
}

// NumPy's array interface, C side: https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two;
  int ndim;
  char kind;
  int itemsize;
  int flags;
  intptr_t* shape;
  intptr_t* strides;  // bytes
  void* data;
};
constexpr int kAligned = 0x100, kNotSwapped = 0x200, kWriteable = 0x400;

int dlpack_code(char kind) {
  switch (kind) {
    case 'i':
      return 0;
    case 'u':
      return 1;
    case 'f':
      return 2;
    case 'c':
      return 5;
    case 'b':
      return 6;
    default:
      return -1;
  }
}

std::string type_of(nb::handle object) { return nb::type_name(object.type()).c_str(); }

// torch's table once torch.cuda is initialised; before that there is no stream but the default one.
const ExchangeApi* torch_with_cuda() {
  static const ExchangeApi* known = nullptr;
  if (known != nullptr) return known;
  nb::object modules = nb::module_::import_("sys").attr("modules");
  nb::object torch = modules.attr("get")("torch");
  if (torch.is_none() || !nb::hasattr(torch, "cuda") || !nb::hasattr(torch, "Tensor"))
    return nullptr;
  if (!nb::cast<bool>(torch.attr("cuda").attr("is_initialized")())) return nullptr;
  nb::object tensor = torch.attr("Tensor");
  return known = exchange_api(reinterpret_cast<PyTypeObject*>(tensor.ptr()));
}

}  // namespace

TensorArg::TensorArg(nb::handle object, const char* name, bool writable) {
  if (object.is_none()) return;
  read(object, name, writable);
  // Without dimensions a TensorView stands for "not given": it must not be mistaken for that.
  check(view.ndim > 0, name, " is a scalar tensor; one with at least one dimension is taken");
}

void TensorArg::read(nb::handle object, const char* name, bool writable) {
  if (from_exchange_api(object)) return;
  if (DeviceArray * array; nb::try_cast(object, array)) {
    view = array->view();
    return;
  }
  if (from_array_struct(object, name, writable)) return;
  if (!nb::try_cast(object, array_)) {
    throw nb::type_error(concat(name,
                                " must be a tensor (NumPy, torch or another with __dlpack__), not ",
                                type_of(object))
                             .c_str());
  }
  if (nb::ndarray<> array; writable && !nb::try_cast(object, array)) {
    throw nb::value_error(concat(name, " is read-only and would be written").c_str());
  }
  view = {const_cast<void*>(static_cast<const void*>(array_.data())),
          array_.device_type(),
          array_.device_id(),
          int32_t(array_.ndim()),
          array_.dtype().code,
          array_.dtype().bits,
          array_.dtype().lanes,
          const_cast<int64_t*>(array_.shape_ptr()),
          const_cast<int64_t*>(array_.stride_ptr()),
          0};
}

bool TensorArg::from_exchange_api(nb::handle object) {
  const ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()));
  if (api == nullptr) return false;
  if (api->borrow(object.ptr(), &view)) throw nb::python_error();
  return true;
}

bool TensorArg::from_array_struct(nb::handle object, const char* name, bool writable) {
  nb::object capsule = nb::getattr(object, "__array_struct__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), nullptr)) return false;
  const auto* array =
      static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (array->two != 2) return false;
  int code = dlpack_code(array->kind);
  const bool is_byte = array->kind == 'f' && array->itemsize == 1;
  if ((array->kind == 'V' && array->itemsize <= 2) || is_byte) {  // ml_dtypes
    const auto name = nb::cast<std::string>(nb::str(nb::object(object.attr("dtype"))));
    if (name == "bfloat16") code = 4;
    if (name == "float8_e4m3fn") code = 10;
    if (name == "float8_e5m2") code = 12;
    if (is_byte && code == 2) code = -1;  // another float of 8 bits
  }
  if (code < 0) {
    const nb::object dtype = object.attr("dtype");
    throw nb::type_error(concat(name, " has NumPy dtype ", nb::str(dtype).c_str(),
                                ", which no tensor argument takes")
                             .c_str());
  }
  check(array->ndim <= kMaxNdim, name, " has ", array->ndim, " dimensions; at most ", kMaxNdim,
        " are taken");
  check((array->flags & kNotSwapped) && (array->flags & kAligned), name,
        " is byte-swapped or not aligned to its element size; copy it with np.ascontiguousarray");
  check(!writable || (array->flags & kWriteable), name, " is read-only and would be written");
  for (int i = 0; i < array->ndim; ++i) {
    const bool whole = array->strides[i] % array->itemsize == 0;
    check(whole || array->shape[i] <= 1, name, " has a stride of ", array->strides[i],
          " bytes in dimension ", i, ", which is no multiple of its ", array->itemsize,
          "-byte element");
    strides_[i] = array->strides[i] / array->itemsize;
  }
  static_assert(sizeof(intptr_t) == sizeof(int64_t));
  view = {array->data,
          kCpu,
          0,
          array->ndim,
          uint8_t(code),
          uint8_t(array->itemsize * 8),
          1,
          reinterpret_cast<int64_t*>(array->shape),
          strides_,
          0};
  keeper_ = std::move(capsule);
  return true;
}

Stream stream_of(nb::handle stream, const Device& device) {
  if (device.type != kCuda) {
    check(stream.is_none(), "stream: ", to_string(device), " has no streams; leave it out");
    return nullptr;
  }
  if (stream.is_none()) {
    const ExchangeApi* torch = torch_with_cuda();
    void* current = nullptr;
    if (torch != nullptr && torch->current_stream != nullptr &&
        torch->current_stream(kCuda, device.id, &current)) {
      throw nb::python_error();
    }
    return current;
  }
  nb::object handle = nb::borrow(stream);
  if (nb::hasattr(stream, "cuda_stream")) {
    handle = stream.attr("cuda_stream");
  } else if (nb::hasattr(stream, "__cuda_stream__")) {
    handle = stream.attr("__cuda_stream__")()[1];
  }
  uint64_t value;
  if (!nb::try_cast(handle, value)) {
    throw nb::type_error(concat("stream must be an integer handle or an object with cuda_stream or "
                                "__cuda_stream__, not ",
                                type_of(stream))
                             .c_str());
  }
  return reinterpret_cast<Stream>(value);
}

}  // namespace plait::python
