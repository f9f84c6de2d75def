// plait/cuda_bench.h: two graphs, [read the L2 empty, work] x n and [read the L2 empty] x n,
// launched in turn between events; the difference is n times the work, its launches included.
#include <algorithm>
#include <optional>
#include <vector>

#include "cuda/memory.h"
#include "host_device/utility_calls.h"
#include "plait/cuda_bench.h"
#include "plait/error.h"

namespace plait {
namespace {

using cuda::check_cuda;
using cuda::driver;

constexpr std::size_t kFoundBytes = 256;  // behind what a MemoryReader reads: ReadAllCall::found

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
  double time_us(const std::function<void(Stream)>& launch, Stream stream) {
    check_cuda(driver().EventRecord(start_, stream), "cuEventRecord");
    launch(stream);
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

struct MemoryReader::Impl {
  cuda::GpuDevice& device;
  std::shared_ptr<const cuda::Kernel> kernel;
  cuda::DeviceBuffer memory;
};

MemoryReader::MemoryReader(const Device& device, long long bytes) {
  check(device.type == kCuda, "MemoryReader: ", to_string(device), " is no GPU");
  check(bytes >= 0, "MemoryReader: bytes is ", bytes);
  cuda::GpuDevice& gpu = cuda::GpuDevice::get(device.id);
  const cuda::CurrentDevice current(gpu);
  if (bytes == 0) {
    int l2_bytes = 0;
    check_cuda(driver().DeviceGetAttribute(&l2_bytes, cuda::kL2CacheBytes, device.id),
               "cuDeviceGetAttribute");
    bytes = 3LL * l2_bytes;
  }
  impl_ = std::make_unique<Impl>(Impl{
      gpu, gpu.utility("read_all", "ReadAllCall"),
      cuda::DeviceBuffer(gpu, (static_cast<std::size_t>(bytes) + 15) / 16 * 16 + kFoundBytes)});
  check_cuda(driver().MemsetD8Async(reinterpret_cast<cuda::DevicePtr>(impl_->memory.data()), 0,
                                    impl_->memory.bytes(), nullptr),
             "cuMemsetD8Async");
  check_cuda(driver().CtxSynchronize(), "cuCtxSynchronize");
}

MemoryReader::~MemoryReader() = default;
MemoryReader::MemoryReader(MemoryReader&&) noexcept = default;

long long MemoryReader::bytes() const {
  return static_cast<long long>(impl_->memory.bytes() - kFoundBytes);
}

void MemoryReader::operator()(Stream stream) const {
  const cuda::CurrentDevice current(impl_->device);
  const ReadAllCall call{
      impl_->memory.data(), bytes() / 16,
      reinterpret_cast<unsigned*>(static_cast<char*>(impl_->memory.data()) + bytes())};
  // Never beside what is measured: it waits for the end of what comes before, and what follows
  // begins at its own.
  constexpr bool kDependent = false;
  impl_->kernel->launch(static_cast<unsigned>(16 * impl_->device.info().num_multiprocessors),
                        stream, &call, kDependent);
}

CudaTiming time_graphs(const Device& device, const std::function<void(Stream)>& both,
                       const std::function<void(Stream)>& reads, const CudaTimingOptions& options) {
  check(device.type == kCuda, "time_graphs: ", to_string(device), " is no GPU");
  check(options.calls_a_graph >= 1 && options.min_graphs >= 1, "time_graphs: calls_a_graph ",
        options.calls_a_graph, " and min_graphs ", options.min_graphs, " must be at least 1");
  const cuda::CurrentDevice current(cuda::GpuDevice::get(device.id));
  const OwnStream own(device);
  EventPair events;
  std::vector<double> with, without;
  // The first launch of a graph uploads it, so that one is left out also without warm_seconds.
  for (double warm_us = 0, first = 1; first == 1 || warm_us < 1e6 * options.warm_seconds;
       first = 0) {
    warm_us += events.time_us(both, own.stream);
    if (reads) events.time_us(reads, own.stream);
  }
  for (double total_us = 0; static_cast<int>(with.size()) < options.min_graphs ||
                            total_us < 1e6 * options.min_seconds;) {
    with.push_back(events.time_us(both, own.stream));
    total_us += with.back();
    if (reads) without.push_back(events.time_us(reads, own.stream));
  }
  const double reads_us = reads ? median(without) : 0;
  const auto [smallest, largest] = std::minmax_element(with.begin(), with.end());
  CudaTiming timing;
  timing.num_graphs = static_cast<int>(with.size());
  timing.calls_a_graph = options.calls_a_graph;
  timing.reads_us = reads_us / options.calls_a_graph;
  timing.median_us = (median(with) - reads_us) / options.calls_a_graph;
  timing.min_us = (*smallest - reads_us) / options.calls_a_graph;
  timing.max_us = (*largest - reads_us) / options.calls_a_graph;
  return timing;
}

CudaTiming time_on_gpu(const Device& device, const std::function<void(Stream)>& work,
                       const CudaTimingOptions& options) {
  check(device.type == kCuda, "time_on_gpu: ", to_string(device), " is no GPU");
  {
    const OwnStream own(device);
    work(own.stream);
    synchronize(device, own.stream);
  }
  std::optional<MemoryReader> reader;
  if (options.cold_l2) reader.emplace(device, 0);
  const auto repeat = [&](bool with_work) {
    return std::make_unique<CudaGraph>(device, [&](Stream s) {
      for (int i = 0; i < options.calls_a_graph; ++i) {
        if (reader) (*reader)(s);
        if (with_work) work(s);
      }
    });
  };
  const std::unique_ptr<CudaGraph> both = repeat(true), reads = reader ? repeat(false) : nullptr;
  const auto launch_reads = [&](Stream s) { reads->launch(s); };
  return time_graphs(
      device, [&](Stream s) { both->launch(s); },
      reads ? std::function<void(Stream)>(launch_reads) : nullptr, options);
}

std::string describe_gpu(const Device& device) {
  check(device.type == kCuda, "describe_gpu: ", to_string(device), " is no GPU");
  const cuda::GpuInfo& info = cuda::GpuDevice::get(device.id).info();
  const int version = driver().version;
  return concat(info.name, ", sm_", info.arch, ", ", info.num_multiprocessors,
                " multiprocessors, driver for CUDA ", version / 1000, ".", version % 1000 / 10);
}

}  // namespace plait
