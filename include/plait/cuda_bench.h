// How fast something runs on a GPU: by CUDA graphs, because an event pair around one launch reads 2
// to 3 us too much, and with an L2 that holds nothing of it.
#pragma once
#include <functional>
#include <string>

#include "plait/cuda_memory.h"

namespace plait {

struct CudaTimingOptions {
  bool cold_l2 = true;  // before each call, other memory is read through the L2 (clean: writes
                        //   would cost the call 4 to 5 us); the time of that is subtracted
  int calls_a_graph = 25;
  int min_graphs = 5;         // launches of each graph, alternating
  double warm_seconds = 0.1;  // of launches before any counts: clocks fall under load
  double min_seconds = 0.2;   // of launches that count
};
struct CudaTiming {
  double median_us = 0, min_us = 0, max_us = 0;  // of one call, over the graphs
  double reads_us = 0;  // median of the reads before one call; 0: there are none
  int num_graphs = 0, calls_a_graph = 0;
};
// A kernel that reads its own memory of `bytes` and keeps nothing; 0: three times the L2.
class MemoryReader {
 public:
  MemoryReader(const Device& device, long long bytes);
  ~MemoryReader();
  MemoryReader(MemoryReader&&) noexcept;
  void operator()(Stream stream) const;  // may be captured
  long long bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Time of one call in a graph that `both` launches, which holds calls_a_graph times [a MemoryReader
// of three L2s, the work]; `reads` launches one of the reads alone (null: there are none in
// `both`). For graphs that somebody else captured; time_on_gpu() captures its own.
CudaTiming time_graphs(const Device& device, const std::function<void(Stream)>& both,
                       const std::function<void(Stream)>& reads,
                       const CudaTimingOptions& options = {});

// Time of what `work` puts on the stream that it is given. It is called once to warm up (kernels
// load), then recorded.
CudaTiming time_on_gpu(const Device& device, const std::function<void(Stream)>& work,
                       const CudaTimingOptions& options = {});

// "NVIDIA H200, sm_90a, 132 multiprocessors, driver 13.0": the first line of every figure.
std::string describe_gpu(const Device& device);

}  // namespace plait
