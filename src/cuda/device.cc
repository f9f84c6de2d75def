#include "cuda/device.h"

#include "jit/texts.h"
#include "plait/error.h"

namespace plait::cuda {

namespace {

// Of sm_90 and later; graphs keep what streams do of it since CUDA 12.3.
bool takes_dependent_launch(const std::string& arch) {
  return std::stoi(arch) >= 90 && driver().version >= 12030;
}

}  // namespace

Kernel::Kernel(const jit::KernelSource& source, const std::string& arch)
    : name_(source.name),
      num_threads_(source.num_threads),
      smem_bytes_(source.smem_bytes),
      can_depend_(takes_dependent_launch(arch)) {
  const jit::Cubin cubin = jit::compile_cubin(source, arch);
  const Driver& d = driver();
  Module module = nullptr;
  std::string loading = concat("loading kernel '", name_, "' (sm_", arch, ")");
  if (const NvrtcInfo nvrtc = nvrtc_info(); nvrtc.newer_than_driver) {
    loading += concat(", compiled by ", nvrtc.path, " of CUDA ", nvrtc.major,
                      ", which is newer than the ", "driver's CUDA ", d.version / 1000,
                      " (install nvidia-cuda-nvrtc-cu12, or set ", "PLAIT_NVRTC to an older one)");
  }
  check_cuda(d.ModuleLoadData(&module, cubin.bytes.data()), loading.c_str());
  check_cuda(d.ModuleGetFunction(&function_, module, source.entry.c_str()), "cuModuleGetFunction");
  if (smem_bytes_ > 48 * 1024) {  // up to there no one need ask
    check_cuda(
        d.FuncSetAttribute(function_, kFunctionMaxDynamicSmem, smem_bytes_),
        concat("kernel '", name_, "' wants ", smem_bytes_, " bytes of shared memory").c_str());
  }
  // As much of the L1 as shared memory as there can be, so that as many CTAs as planned fit.
  check_cuda(d.FuncSetAttribute(function_, kFunctionSmemCarveout, 100), "cuFuncSetAttribute");
}

void Kernel::launch(unsigned grid, Stream stream, const void* argument, bool dependent) const {
  LaunchConfig config{};
  config.grid_x = grid;
  config.grid_y = config.grid_z = 1;
  config.block_x = static_cast<unsigned>(num_threads_);
  config.block_y = config.block_z = 1;
  config.smem_bytes = static_cast<unsigned>(smem_bytes_);
  config.stream = stream;
  LaunchAttribute early{};
  early.id = kLaunchProgrammaticStreamSerialization;
  early.value.enabled = 1;
  config.attributes = &early;
  config.num_attributes = dependent && can_depend_ ? 1 : 0;
  void* arguments[] = {const_cast<void*>(argument)};
  const int error = driver().LaunchKernelEx(&config, function_, arguments, nullptr);
  if (error != kSuccess) [[unlikely]] {
    check_cuda(error, concat("launching kernel '", name_, "'").c_str());
  }
}

GpuDevice::GpuDevice(int id) : id_(id) {
  const Driver& d = driver();
  DeviceId device = 0;
  check_cuda(d.DeviceGet(&device, id), "cuDeviceGet");
  info_ = gpu_info(device);
  check_cuda(d.DevicePrimaryCtxRetain(&context_, device), concat("opening cuda:", id).c_str());
}

GpuDevice& GpuDevice::get(int id) {
  // Never destroyed: at exit the driver may be gone before us.
  static std::mutex mutex;
  static auto& devices = *new std::map<int, std::unique_ptr<GpuDevice>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<GpuDevice>& device = devices[id];
  if (device == nullptr) {
    int count = 0;
    check_cuda(driver().DeviceGetCount(&count), "cuDeviceGetCount");
    check(id >= 0 && id < count, "device cuda:", id, ": this machine has ", count,
          count == 1 ? " GPU" : " GPUs", " (cuda:0 ... cuda:", count - 1, ")");
    device.reset(new GpuDevice(id));
  }
  return *device;
}

std::shared_ptr<const Kernel> GpuDevice::kernel(const jit::KernelSource& source) {
  if (jit::includes_other_files(source.text)) {
    return std::make_shared<const Kernel>(source, info_.arch);
  }
  {
    const std::lock_guard lock(mutex_);
    const auto it = kernels_.find(source.text);
    if (it != kernels_.end()) return it->second;
  }
  // Unlocked: several threads may compile at the same time.
  auto kernel = std::make_shared<const Kernel>(source, info_.arch);
  const std::lock_guard lock(mutex_);
  return kernels_.try_emplace(source.text, std::move(kernel)).first->second;
}

std::shared_ptr<const Kernel> GpuDevice::utility(const std::string& name,
                                                 const std::string& call_type,
                                                 std::optional<Dtype> dtype, int num_threads) {
  const std::string key = dtype ? concat(name, " ", static_cast<int>(*dtype)) : name;
  {
    const std::lock_guard lock(mutex_);
    const auto it = utilities_.find(key);
    if (it != utilities_.end()) return it->second;
  }
  const auto loaded = kernel(jit::assemble_utility(name, dtype, call_type, num_threads));
  const std::lock_guard lock(mutex_);
  return utilities_.try_emplace(key, loaded).first->second;
}

CurrentDevice::CurrentDevice(const GpuDevice& device) {
  check_cuda(driver().CtxPushCurrent(device.context()), "cuCtxPushCurrent");
}
CurrentDevice::~CurrentDevice() {
  Context popped = nullptr;
  driver().CtxPopCurrent(&popped);  // cannot throw here, and fails only after a fault
}

OutsideCaptures::OutsideCaptures() : mode_(kCaptureRelaxed) {
  check_cuda(driver().ThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
}
OutsideCaptures::~OutsideCaptures() {
  driver().ThreadExchangeStreamCaptureMode(&mode_);  // cannot throw here, nor fail with that mode
}

bool captures(Stream stream) {
  int status = kCaptureNone;
  // The default stream cannot be asked while another one captures: an error that says the same.
  return driver().StreamIsCapturing(stream, &status) != kSuccess || status != kCaptureNone;
}

void refuse_capture(Stream stream, const char* what, const char* instead) {
  check(!captures(stream), what,
        " was called while its stream captures a CUDA graph (or while another one captures and the "
        "stream is the default one): ",
        instead);
}

}  // namespace plait::cuda
