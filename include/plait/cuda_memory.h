// GPU memory, streams and CUDA graphs for programs without a framework: the replay, the benchmarks
// and the tests. Every call makes the device current for itself only. Throws ArgumentError for a
// device that is none, Error where the driver fails.
#pragma once
#include <functional>
#include <memory>

#include "plait/attention.h"
#include "plait/tensor.h"

namespace plait {

// 256-byte aligned, contents undefined; 0 bytes give a pointer that may be freed.
void* device_alloc(const Device& device, long long bytes);
void device_free(const Device& device, void* data);  // waits for the device; null is ignored

// Copies between pageable host memory and `device`, in the order of `stream`. copy_to_host returns
// when the data is there; copy_to_device when `from` may be used again.
void copy_to_device(const Device& device, void* to, const void* from, long long bytes,
                    Stream stream = nullptr);
void copy_to_host(const Device& device, void* to, const void* from, long long bytes,
                  Stream stream = nullptr);
void fill_bytes(const Device& device, void* data, int value, long long bytes,
                Stream stream = nullptr);
void synchronize(const Device& device);  // everything on the device
void synchronize(const Device& device, Stream stream);
// Of a stream that does not wait for the default one.
Stream create_stream(const Device& device);
void destroy_stream(const Device& device, Stream stream);

// What `work` puts on the stream that it is given, recorded once and launched again and again.
class CudaGraph {
 public:
  CudaGraph(const Device& device, const std::function<void(Stream)>& work);
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  void launch(Stream stream = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plait
