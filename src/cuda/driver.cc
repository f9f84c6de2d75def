// Opens libcuda.so.1 and asks it for the functions of CUDA 12.0.
#include "cuda/driver.h"

#include <dlfcn.h>

#include "plait/error.h"
#include "plait/jit.h"

namespace plait::cuda {
namespace {

constexpr int kSignatures = 12000;  // of CUDA 12.0, whatever the driver
constexpr int kStubLibrary = 34;    // CUDA_ERROR_STUB_LIBRARY: the toolkit's link-time stand-in
constexpr int kNoDevice = 100;

struct Opened {
  Driver driver;
  std::string why_not;  // empty: usable
};

Opened open_driver() {
  Opened opened;
  const auto refuse = [&](const std::string& what) {
    opened.why_not = "CUDA driver: " + what + "; device 'cpu' works without it";
    return opened;
  };
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed
  if (library == nullptr) {
    const char* error = dlerror();
    return refuse(concat("libcuda.so.1 was not opened (", error ? error : "no reason given",
                         "): install the NVIDIA driver, or give the container access to the GPU"));
  }
  using GetProcAddress = int (*)(const char*, void**, int, std::uint64_t, int*);
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    return refuse("libcuda.so.1 is older than CUDA 12.0 (no cuGetProcAddress_v2): update it");
  }
  Driver& d = opened.driver;
#define X(name, params)                                                                     \
  {                                                                                         \
    void* address = nullptr;                                                                \
    const int error = get("cu" #name, &address, kSignatures, 0, nullptr);                   \
    if (error == kStubLibrary) {                                                            \
      return refuse("libcuda.so.1 is the toolkit's stub, there is no driver: install one"); \
    }                                                                                       \
    if (error != 0 || address == nullptr) return refuse("no cu" #name ": update it");       \
    d.name = reinterpret_cast<int(*) params>(address);                                      \
  }
  PLAIT_DRIVER_FUNCTIONS(X)
#undef X
  if (const int error = d.Init(0); error != 0) {
    if (error == kStubLibrary) {
      return refuse("libcuda.so.1 is the toolkit's stub, there is no driver: install one");
    }
    if (error == kNoDevice) return refuse("no GPU is visible (check CUDA_VISIBLE_DEVICES)");
    const char* name = nullptr;
    d.GetErrorName(error, &name);
    return refuse(
        concat("cuInit failed with ", name ? name : "an unknown error", " (", error, ")"));
  }
  d.DriverGetVersion(&d.version);
  return opened;
}

const Opened& opened_driver() {
  static const Opened opened = open_driver();
  return opened;
}

int attribute(DeviceId device, DeviceAttribute which) {
  int value = 0;
  check_cuda(driver().DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace

const Driver& driver() {
  const Opened& opened = opened_driver();
  if (!opened.why_not.empty()) throw Error(opened.why_not);
  return opened.driver;
}

bool driver_available(std::string* why) {
  const Opened& opened = opened_driver();
  if (why != nullptr) *why = opened.why_not;
  return opened.why_not.empty();
}

void check_cuda(int error, const char* what) {
  if (error == kSuccess) [[likely]]
    return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver().GetErrorName(error, &name);
  driver().GetErrorString(error, &text);
  fail(what, ": ", name ? name : "unknown CUDA error", " (", error, ")", text ? ": " : "",
       text ? text : "");
}

GpuInfo gpu_info(DeviceId device) {
  GpuInfo info;
  char name[256] = "";
  check_cuda(driver().DeviceGetName(name, sizeof name, device), "cuDeviceGetName");
  info.name = name;
  const int major = attribute(device, kComputeCapabilityMajor);
  const int minor = attribute(device, kComputeCapabilityMinor);
  info.arch =
      concat(major, minor, major == 9 ? "a" : "");  // wgmma and setmaxnreg exist in 90a only
  info.num_multiprocessors = attribute(device, kMultiprocessorCount);
  info.max_smem_bytes = attribute(device, kMaxSmemPerBlockOptin);
  check_cuda(driver().DeviceTotalMem(&info.memory_bytes, device), "cuDeviceTotalMem");
  return info;
}

std::vector<GpuInfo> list_gpus() {
  std::vector<GpuInfo> gpus;
  if (!driver_available()) return gpus;
  int count = 0;
  check_cuda(driver().DeviceGetCount(&count), "cuDeviceGetCount");
  for (int i = 0; i < count; ++i) {
    DeviceId device = 0;
    check_cuda(driver().DeviceGet(&device, i), "cuDeviceGet");
    gpus.push_back(gpu_info(device));
  }
  return gpus;
}

}  // namespace plait::cuda

namespace plait {

DriverInfo driver_info() {
  DriverInfo info;
  info.found = cuda::driver_available(&info.why_not);
  if (!info.found) return info;
  info.major = cuda::driver().version / 1000;
  info.minor = cuda::driver().version % 1000 / 10;
  for (const cuda::GpuInfo& gpu : cuda::list_gpus()) {
    info.gpus.push_back(
        {gpu.name, gpu.arch, gpu.num_multiprocessors, static_cast<long long>(gpu.memory_bytes)});
  }
  return info;
}

}  // namespace plait
