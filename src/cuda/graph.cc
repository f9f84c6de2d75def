// CudaGraph of plait/cuda_memory.h.
#include "cuda/device.h"
#include "plait/cuda_memory.h"
#include "plait/error.h"

namespace plait {

using cuda::check_cuda;
using cuda::driver;

struct CudaGraph::Impl {
  Device device;
  cuda::GraphExec exec = nullptr;
};

CudaGraph::CudaGraph(const Device& device, const std::function<void(Stream)>& work)
    : impl_(std::make_unique<Impl>()) {
  check(device.type == kCuda, "CudaGraph: ", to_string(device), " is no GPU");
  impl_->device = device;
  const Stream stream = create_stream(device);
  const cuda::CurrentDevice current(cuda::GpuDevice::get(device.id));
  cuda::Graph graph = nullptr;
  try {
    // Thread-local: other threads may allocate meanwhile.
    check_cuda(driver().StreamBeginCapture(stream, cuda::kCaptureThreadLocal),
               "cuStreamBeginCapture");
    try {
      work(stream);
    } catch (...) {
      driver().StreamEndCapture(stream, &graph);  // whatever it says: the work's error is the news
      throw;
    }
    check_cuda(driver().StreamEndCapture(stream, &graph), "cuStreamEndCapture");
    check_cuda(driver().GraphInstantiate(&impl_->exec, graph, 0), "cuGraphInstantiate");
  } catch (...) {
    if (graph != nullptr) driver().GraphDestroy(graph);
    driver().StreamDestroy(stream);
    throw;
  }
  driver().GraphDestroy(graph);
  driver().StreamDestroy(stream);
}

CudaGraph::~CudaGraph() {
  if (driver().CtxPushCurrent(cuda::GpuDevice::get(impl_->device.id).context()) != 0) return;
  driver().GraphExecDestroy(impl_->exec);
  cuda::Context popped = nullptr;
  driver().CtxPopCurrent(&popped);
}

void CudaGraph::launch(Stream stream) {
  const cuda::CurrentDevice current(cuda::GpuDevice::get(impl_->device.id));
  check_cuda(driver().GraphLaunch(impl_->exec, stream), "cuGraphLaunch");
}

}  // namespace plait
