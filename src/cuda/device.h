// What the process holds of a GPU: its primary context (the one that PyTorch and the runtime use),
// loaded kernels by their text, pinned staging memory. Kept for the life of the process.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cuda/driver.h"
#include "cuda/staging.h"
#include "jit/jit.h"

namespace plait::cuda {

// A loaded kernel and how it is launched.
class Kernel {
 public:
  Kernel(const jit::KernelSource& source, const std::string& arch);  // context is current
  // `argument`: the kernel's one parameter, at least as many bytes as it has. dependent: where the
  // GPU can, it begins while the kernel before it is ending, for which it waits itself
  // (kernels/ptx/dependent_launch.cuh).
  void launch(unsigned grid, Stream stream, const void* argument, bool dependent = true) const;
  const std::string& name() const { return name_; }
  int num_threads() const { return num_threads_; }

 private:
  std::string name_;
  Function function_ = nullptr;  // its module is never unloaded: a captured graph may need it
  int num_threads_, smem_bytes_;
  bool can_depend_;
};

class GpuDevice {
 public:
  // Opens GPU `id` at its first use. Throws ArgumentError if there is no such device, Error if it
  // cannot be used.
  static GpuDevice& get(int id);

  int id() const { return id_; }
  Context context() const { return context_; }
  const GpuInfo& info() const { return info_; }
  // Compiled and loaded once a text, unless it includes files of the user's. The context must be
  // current.
  std::shared_ptr<const Kernel> kernel(const jit::KernelSource& source);
  // kernels/<name>.cuh, see jit::assemble_utility. Loaded at its first use.
  std::shared_ptr<const Kernel> utility(const std::string& name, const std::string& call_type,
                                        std::optional<Dtype> dtype = {},
                                        int num_threads = jit::kUtilityThreads);
  // Of the operations beside attention, from any thread.
  StagingRing& staging() { return staging_; }

 private:
  explicit GpuDevice(int id);
  int id_;
  Context context_ = nullptr;
  GpuInfo info_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Kernel>> kernels_;    // by text
  std::map<std::string, std::shared_ptr<const Kernel>> utilities_;  // by name and dtype
  StagingRing staging_;
};

// Makes the device's context current until the end of the scope; the caller's comes back then.
class CurrentDevice {
 public:
  explicit CurrentDevice(const GpuDevice& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
};

// Until the end of the scope this thread may pin, allocate and ask events while some stream
// captures in global mode: what it does belongs to no capture, and would else invalidate that one.
class OutsideCaptures {
 public:
  OutsideCaptures();
  ~OutsideCaptures();
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  int mode_;  // the thread's own, while the relaxed one is in force
};

// Whether `stream` captures a CUDA graph. The context is current.
bool captures(Stream stream);
// Throws ArgumentError if `stream` captures a CUDA graph: "<what> ...". The context is current.
void refuse_capture(Stream stream, const char* what, const char* instead);

}  // namespace plait::cuda
