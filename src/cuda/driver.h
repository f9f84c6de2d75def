// The CUDA driver, opened at run time: declarations of our own, so that plait builds without any
// CUDA header and starts without any CUDA library. tests/cuda/driver_abi_test.cc compares every
// line of this file with cuda.h wherever one is installed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace plait::cuda {

using DevicePtr = unsigned long long;
using DeviceId = int;  // CUdevice: the ordinal
using Context = struct OpaqueContext*;
using Module = struct OpaqueModule*;
using Function = struct OpaqueFunction*;
using Stream = void*;  // CUstream
using Event = struct OpaqueEvent*;
using Graph = struct OpaqueGraph*;
using GraphExec = struct OpaqueGraphExec*;

struct alignas(128) TensorMap {
  std::uint64_t opaque[16];  // CUDA 12 wants 64-byte alignment, CUDA 13 128
};

enum LaunchAttributeId {
  kLaunchCooperative = 2,
  kLaunchClusterDimension = 4,
  kLaunchProgrammaticStreamSerialization = 6,  // dependent launch
};
struct LaunchAttribute {
  int id;  // LaunchAttributeId
  alignas(8) union {
    char bytes[64];
    int enabled;               // cooperative, programmatic stream serialization
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned smem_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// Values of the enumerations that we use, under our names.
enum DeviceAttribute {
  kClockRateKhz = 13,
  kMultiprocessorCount = 16,
  kMemoryClockRateKhz = 36,
  kMemoryBusWidthBits = 37,
  kL2CacheBytes = 38,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSmemPerMultiprocessor = 81,
  kMaxSmemPerBlockOptin = 97,
};
enum FunctionAttribute {
  kFunctionLocalBytes = 3,
  kFunctionNumRegisters = 4,
  kFunctionMaxDynamicSmem = 8,
  kFunctionSmemCarveout = 9,
};
enum PointerAttribute { kPointerMemoryType = 2, kPointerIsManaged = 8, kPointerDeviceOrdinal = 9 };
enum MemoryType { kMemoryHost = 1, kMemoryDevice = 2 };
enum CaptureStatus { kCaptureNone = 0, kCaptureActive = 1, kCaptureInvalidated = 2 };
enum CaptureMode { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum StreamFlags { kStreamDefault = 0, kStreamNonBlocking = 1 };
enum EventFlags { kEventDefault = 0, kEventDisableTiming = 2 };
enum TensorMapDataType {
  kTensorMapUint8 = 0,
  kTensorMapFloat16 = 6,
  kTensorMapFloat32 = 7,
  kTensorMapBfloat16 = 9,
};
enum TensorMapInterleave { kInterleaveNone = 0 };
enum TensorMapSwizzle { kSwizzleNone = 0, kSwizzle32B = 1, kSwizzle64B = 2, kSwizzle128B = 3 };
enum TensorMapL2Promotion {
  kL2None = 0,
  kL2Promote64B = 1,
  kL2Promote128B = 2,
  kL2Promote256B = 3
};
enum TensorMapOobFill { kOobZero = 0 };
enum Result { kSuccess = 0, kErrorOutOfMemory = 2, kErrorNotReady = 600 };

// One entry per driver function, with the signature it has in CUDA 12.0. Names lack the "cu",
// because cuda.h makes macros of cuMemAlloc and others.
#define PLAIT_DRIVER_FUNCTIONS(X)                                                                  \
  X(Init, (unsigned flags))                                                                        \
  X(DriverGetVersion, (int* version))                                                              \
  X(GetErrorName, (int error, const char** name))                                                  \
  X(GetErrorString, (int error, const char** text))                                                \
  X(DeviceGetCount, (int* count))                                                                  \
  X(DeviceGet, (DeviceId * device, int ordinal))                                                   \
  X(DeviceGetName, (char* name, int bytes, DeviceId device))                                       \
  X(DeviceGetAttribute, (int* value, int attribute, DeviceId device))                              \
  X(DeviceTotalMem, (size_t * bytes, DeviceId device))                                             \
  X(DevicePrimaryCtxRetain, (Context * context, DeviceId device))                                  \
  X(DevicePrimaryCtxRelease, (DeviceId device))                                                    \
  X(CtxGetCurrent, (Context * context))                                                            \
  X(CtxSetCurrent, (Context context))                                                              \
  X(CtxPushCurrent, (Context context))                                                             \
  X(CtxPopCurrent, (Context * context))                                                            \
  X(CtxGetDevice, (DeviceId * device))                                                             \
  X(CtxSynchronize, (void))                                                                        \
  X(MemGetInfo, (size_t * free, size_t* total))                                                    \
  X(MemAlloc, (DevicePtr * ptr, size_t bytes))                                                     \
  X(MemFree, (DevicePtr ptr))                                                                      \
  X(MemHostAlloc, (void** ptr, size_t bytes, unsigned flags))                                      \
  X(MemFreeHost, (void* ptr))                                                                      \
  X(MemcpyHtoD, (DevicePtr dst, const void* src, size_t bytes))                                    \
  X(MemcpyDtoH, (void* dst, DevicePtr src, size_t bytes))                                          \
  X(MemcpyHtoDAsync, (DevicePtr dst, const void* src, size_t bytes, Stream stream))                \
  X(MemcpyDtoHAsync, (void* dst, DevicePtr src, size_t bytes, Stream stream))                      \
  X(MemcpyDtoDAsync, (DevicePtr dst, DevicePtr src, size_t bytes, Stream stream))                  \
  X(MemsetD8Async, (DevicePtr dst, unsigned char value, size_t count, Stream stream))              \
  X(MemsetD32Async, (DevicePtr dst, unsigned value, size_t count, Stream stream))                  \
  X(PointerGetAttribute, (void* value, int attribute, DevicePtr ptr))                              \
  X(ModuleLoadData, (Module * module, const void* image))                                          \
  X(ModuleUnload, (Module module))                                                                 \
  X(ModuleGetFunction, (Function * function, Module module, const char* name))                     \
  X(FuncSetAttribute, (Function function, int attribute, int value))                               \
  X(FuncGetAttribute, (int* value, int attribute, Function function))                              \
  X(OccupancyMaxActiveBlocksPerMultiprocessor,                                                     \
    (int* blocks, Function function, int num_threads, size_t smem_bytes))                          \
  X(LaunchKernel, (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,           \
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem_bytes,      \
                   Stream stream, void** params, void** extra))                                    \
  X(LaunchKernelEx, (const LaunchConfig* config, Function function, void** params, void** extra))  \
  X(StreamCreate, (Stream * stream, unsigned flags))                                               \
  X(StreamDestroy, (Stream stream))                                                                \
  X(StreamSynchronize, (Stream stream))                                                            \
  X(StreamQuery, (Stream stream))                                                                  \
  X(StreamWaitEvent, (Stream stream, Event event, unsigned flags))                                 \
  X(StreamIsCapturing, (Stream stream, int* status))                                               \
  X(StreamBeginCapture, (Stream stream, int mode))                                                 \
  X(StreamEndCapture, (Stream stream, Graph * graph))                                              \
  X(ThreadExchangeStreamCaptureMode, (int* mode))                                                  \
  X(GraphInstantiate, (GraphExec * exec, Graph graph, unsigned long long flags))                   \
  X(GraphLaunch, (GraphExec exec, Stream stream))                                                  \
  X(GraphExecDestroy, (GraphExec exec))                                                            \
  X(GraphDestroy, (Graph graph))                                                                   \
  X(EventCreate, (Event * event, unsigned flags))                                                  \
  X(EventRecord, (Event event, Stream stream))                                                     \
  X(EventQuery, (Event event))                                                                     \
  X(EventSynchronize, (Event event))                                                               \
  X(EventElapsedTime, (float* ms, Event start, Event end))                                         \
  X(EventDestroy, (Event event))                                                                   \
  X(TensorMapEncodeTiled,                                                                          \
    (TensorMap * map, int data_type, std::uint32_t rank, void* address,                            \
     const std::uint64_t* dims, const std::uint64_t* strides_bytes, const std::uint32_t* box,      \
     const std::uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,          \
     int oob_fill))

struct Driver {
#define X(name, params) int(*name) params = nullptr;
  PLAIT_DRIVER_FUNCTIONS(X)
#undef X
  int version = 0;  // 13000 for CUDA 13.0: the newest toolkit that the driver takes
};

// The opened and initialised driver. Throws Error that says what is missing and what to do.
const Driver& driver();
// Whether driver() would return; else `why` (may be null) gets its message.
bool driver_available(std::string* why = nullptr);
// Throws Error "<what>: CUDA_ERROR_...: text" unless `error` is 0.
void check_cuda(int error, const char* what);

struct GpuInfo {
  std::string name;
  std::string arch;              // as NVRTC takes it: "90a", "89"
  int num_multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t max_smem_bytes = 0;  // of a block, opted in
};
GpuInfo gpu_info(DeviceId device);
std::vector<GpuInfo> list_gpus();  // empty without a driver

}  // namespace plait::cuda
