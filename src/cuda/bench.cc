// plait/cuda_bench.h: two graphs, [read the L2 empty, work] x n and [read the L2 empty] x n,
// launched in turn between events; the difference is n times the work, its launches included.
#include <algorithm>
#include <vector>

#include "cuda/memory.h"
#include "host_device/utility_calls.h"
#include "plait/cuda_bench.h"
#include "plait/error.h"

namespace plait {
namespace {

using cuda::check_cuda;
using cuda::driver;

// Reads memory of three times the L2's size.
class L2Flush {
 public:
  explicit L2Flush(cuda::GpuDevice& device)
      : kernel_(device.utility("read_all", "ReadAllCall")),
        grid_(static_cast<unsigned>(8 * device.info().num_multiprocessors)) {
    int l2_bytes = 0;
    check_cuda(driver().DeviceGetAttribute(&l2_bytes, cuda::kL2CacheBytes, device.id()),
               "cuDeviceGetAttribute");
    memory_ = cuda::DeviceBuffer(device, 3 * static_cast<std::size_t>(l2_bytes) + 256);
    check_cuda(driver().MemsetD8Async(reinterpret_cast<cuda::DevicePtr>(memory_.data()), 0,
                                      memory_.bytes(), nullptr),
               "cuMemsetD8Async");
    check_cuda(driver().CtxSynchronize(), "cuCtxSynchronize");
  }
  void operator()(Stream stream) const {
    const i64 units = static_cast<i64>(memory_.bytes() / 16) - 16;  // the last 256 bytes: `found`
    const ReadAllCall call{
        memory_.data(), units,
        reinterpret_cast<unsigned*>(static_cast<char*>(memory_.data()) + 16 * units)};
    kernel_->launch(grid_, stream, &call);
  }

 private:
  std::shared_ptr<const cuda::Kernel> kernel_;
  unsigned grid_;
  cuda::DeviceBuffer memory_;
};

class EventPair {
 public:
  EventPair() {
    check_cuda(driver().EventCreate(&start_, cuda::kEventDefault), "cuEventCreate");
    check_cuda(driver().EventCreate(&end_, cuda::kEventDefault), "cuEventCreate");
  }
  ~EventPair() {
    driver().EventDestroy(start_);
    driver().EventDestroy(end_);
  }
  EventPair(const EventPair&) = delete;
  EventPair& operator=(const EventPair&) = delete;
  double time_us(CudaGraph& graph, Stream stream) {
    check_cuda(driver().EventRecord(start_, stream), "cuEventRecord");
    graph.launch(stream);
    check_cuda(driver().EventRecord(end_, stream), "cuEventRecord");
    check_cuda(driver().EventSynchronize(end_), "cuEventSynchronize");
    float ms = 0;
    check_cuda(driver().EventElapsedTime(&ms, start_, end_), "cuEventElapsedTime");
    return 1e3 * ms;
  }

 private:
  cuda::Event start_ = nullptr, end_ = nullptr;
};

struct OwnStream {
  explicit OwnStream(const Device& device) : device(device), stream(create_stream(device)) {}
  ~OwnStream() { driver().StreamDestroy(stream); }
  Device device;
  Stream stream;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

}  // namespace

CudaTiming time_on_gpu(const Device& device, const std::function<void(Stream)>& work,
                       const CudaTimingOptions& options) {
  check(device.type == kCuda, "time_on_gpu: ", to_string(device), " is no GPU");
  check(options.calls_a_graph >= 1 && options.min_graphs >= 1, "time_on_gpu: calls_a_graph ",
        options.calls_a_graph, " and min_graphs ", options.min_graphs, " must be at least 1");
  cuda::GpuDevice& gpu = cuda::GpuDevice::get(device.id);
  const cuda::CurrentDevice current(gpu);
  const L2Flush flush(gpu);
  const OwnStream own(device);
  const Stream stream = own.stream;
  work(stream);
  check_cuda(driver().StreamSynchronize(stream), "warming up");

  CudaGraph both(device, [&](Stream s) {
    for (int i = 0; i < options.calls_a_graph; ++i) {
      if (options.cold_l2) flush(s);
      work(s);
    }
  });
  std::unique_ptr<CudaGraph> flush_only;
  if (options.cold_l2) {
    flush_only = std::make_unique<CudaGraph>(device, [&](Stream s) {
      for (int i = 0; i < options.calls_a_graph; ++i) flush(s);
    });
  }

  EventPair events;
  events.time_us(both, stream);  // the first launch of a graph uploads it
  if (flush_only) events.time_us(*flush_only, stream);
  std::vector<double> with, without;
  double total_us = 0;
  while (static_cast<int>(with.size()) < options.min_graphs ||
         total_us < 1e6 * options.min_seconds) {
    with.push_back(events.time_us(both, stream));
    total_us += with.back();
    if (flush_only) without.push_back(events.time_us(*flush_only, stream));
  }
  const double flush_us = flush_only ? median(without) : 0;
  CudaTiming timing;
  timing.num_graphs = static_cast<int>(with.size());
  timing.calls_a_graph = options.calls_a_graph;
  timing.median_us = (median(with) - flush_us) / options.calls_a_graph;
  timing.min_us = (*std::min_element(with.begin(), with.end()) - flush_us) / options.calls_a_graph;
  timing.max_us = (*std::max_element(with.begin(), with.end()) - flush_us) / options.calls_a_graph;
  return timing;
}

std::string describe_gpu(const Device& device) {
  check(device.type == kCuda, "describe_gpu: ", to_string(device), " is no GPU");
  const cuda::GpuInfo& info = cuda::GpuDevice::get(device.id).info();
  const int version = driver().version;
  return concat(info.name, ", sm_", info.arch, ", ", info.num_multiprocessors,
                " multiprocessors, driver for CUDA ", version / 1000, ".", version % 1000 / 10);
}

}  // namespace plait
