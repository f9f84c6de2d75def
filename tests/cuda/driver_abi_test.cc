// Our declarations of the driver (cuda/driver.h) against the toolkit's, where cuda.h is installed:
// every signature by arity, size and pointer-ness, every struct and every constant. All of it is
// checked at compile time; without cuda.h the test says that it was skipped, and with
// PLAIT_TEST_STRICT=1 fails.
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "cuda/driver.h"
#include "required.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace {
using namespace plait::cuda;

template <class Ours, class Theirs>
constexpr bool kSameKind =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;

template <class Ours, class Theirs>
struct SameSignature : std::false_type {};
template <class... Ours, class Result, class... Theirs>
struct SameSignature<int (*)(Ours...), Result (*)(Theirs...)> {
  static constexpr bool compare() {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return sizeof(Result) == sizeof(int) && (kSameKind<Ours, Theirs> && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = compare();
};

#define X(name, params)                                                              \
  static_assert(SameSignature<decltype(Driver::name), decltype(&::cu##name)>::value, \
                "cu" #name " differs from cuda.h");
PLAIT_DRIVER_FUNCTIONS(X)
#undef X
// The comparison itself must be able to fail.
static_assert(!SameSignature<int (*)(int), CUresult (*)(int, int)>::value);
static_assert(!SameSignature<int (*)(int), CUresult (*)(void*)>::value);
static_assert(!SameSignature<int (*)(unsigned long long), CUresult (*)(void*)>::value);

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) &&
              alignof(TensorMap) >= alignof(CUtensorMap));
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(alignof(LaunchAttribute) == alignof(CUlaunchAttribute));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(LaunchConfig, grid_x) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(LaunchConfig, block_x) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(LaunchConfig, smem_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));

#define SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #ours)
SAME(kLaunchCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(kLaunchClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(kLaunchProgrammaticStreamSerialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(kClockRateKhz, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
SAME(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(kMemoryClockRateKhz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
SAME(kMemoryBusWidthBits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
SAME(kL2CacheBytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME(kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(kMaxSmemPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
SAME(kMaxSmemPerBlockOptin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(kFunctionLocalBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME(kFunctionNumRegisters, CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(kFunctionMaxDynamicSmem, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(kFunctionSmemCarveout, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
SAME(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(kPointerIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(kMemoryHost, CU_MEMORYTYPE_HOST);
SAME(kMemoryDevice, CU_MEMORYTYPE_DEVICE);
SAME(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(kCaptureInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
SAME(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
SAME(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(kStreamDefault, CU_STREAM_DEFAULT);
SAME(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(kEventDefault, CU_EVENT_DEFAULT);
SAME(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME(kTensorMapUint8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
SAME(kTensorMapFloat16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
SAME(kTensorMapFloat32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
SAME(kTensorMapBfloat16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME(kInterleaveNone, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME(kSwizzleNone, CU_TENSOR_MAP_SWIZZLE_NONE);
SAME(kSwizzle32B, CU_TENSOR_MAP_SWIZZLE_32B);
SAME(kSwizzle64B, CU_TENSOR_MAP_SWIZZLE_64B);
SAME(kSwizzle128B, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(kL2None, CU_TENSOR_MAP_L2_PROMOTION_NONE);
SAME(kL2Promote64B, CU_TENSOR_MAP_L2_PROMOTION_L2_64B);
SAME(kL2Promote128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
SAME(kL2Promote256B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME(kOobZero, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
SAME(kSuccess, CUDA_SUCCESS);
SAME(kErrorOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(kErrorNotReady, CUDA_ERROR_NOT_READY);

}  // namespace

TEST(DriverAbi, MatchesCudaHeader) { SUCCEED() << "compared with cuda.h " << CUDA_VERSION; }
#else
TEST(DriverAbi, MatchesCudaHeader) {
  if (plait::test::required("PLAIT_TEST_STRICT")) FAIL() << "no cuda.h on the include path";
  GTEST_SKIP() << "no cuda.h on the include path";
}
#endif

// Whether or not there is a driver, asking for it either works or explains itself.
TEST(Driver, SaysWhatIsMissing) {
  std::string why;
  if (plait::cuda::driver_available(&why)) {
    EXPECT_GE(plait::cuda::driver().version, 12000);
    EXPECT_TRUE(why.empty());
  } else {
    EXPECT_NE(why.find("CUDA driver: "), std::string::npos);
    EXPECT_NE(why.find("'cpu'"), std::string::npos) << why;
    EXPECT_TRUE(plait::cuda::list_gpus().empty());
    EXPECT_ANY_THROW(plait::cuda::driver());
  }
}
