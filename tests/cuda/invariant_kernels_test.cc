// Invariant mode: whatever the bounds, kernels of the same heads, dtypes, variant and architecture
// agree in all that the bits of a row follow from: template, keys of a tile, how fp8 is multiplied,
// no split keys. (docs/invariant.md)
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "cuda/kernel_choice.h"
#include "host_device/convert.h"
#include "plait/error.h"

namespace plait::cuda {
namespace {

struct Bits {
  Template kind;
  int tile_kv, num_wide_tiles, chunk_keys;
  bool operator==(const Bits&) const = default;
};

// Of every layout and bounds: decode, few and many queries, one request and many.
void expect_same_bits(AttentionConfig config, const std::string& arch) {
  std::optional<Bits> first;
  for (const int page_size : {0, 1, 16}) {
    config.kv = page_size == 0 ? ragged_kv() : paged_kv(page_size);
    for (const Bounds& bounds :
         {Bounds{64, 64, 8192, 0, 1}, Bounds{1, 1, 8192, 0, 1}, Bounds{64, 256, 8192, 0, 4},
          Bounds{1, 16, 8192, 0, 16}, Bounds{1, 2048, 8192}, Bounds{64, 65536, 8192}}) {
      config.bounds = bounds;
      const KernelConfig c = choose_kernel(config, arch);
      const Bits bits{template_of(c), c.tile_kv, c.num_wide_tiles, c.chunk_keys};
      if (!first) first = bits;
      EXPECT_TRUE(*first == bits) << "page " << page_size << ", " << bounds.requests
                                  << " requests, " << bounds.query_tokens << " queries: tile_kv "
                                  << first->tile_kv << " and " << bits.tile_kv << ", wide tiles "
                                  << first->num_wide_tiles << " and " << bits.num_wide_tiles;
      EXPECT_EQ(bits.chunk_keys, config.chunk_keys);
      EXPECT_EQ(config.chunk_keys % c.tile_kv, 0);
      for (int i = 0; i < c.num_shapes; ++i) EXPECT_EQ(c.shapes[i].key_split, 1);
    }
  }
}

TEST(InvariantKernels, BoundsChangeNothingThatBitsFollowFrom) {
  const struct {
    int qk, vo;
  } dims[] = {{8, 8}, {64, 64}, {72, 40}, {128, 128}, {192, 128}, {256, 256}, {128, 256}};
  const Variant variants[] = {causal(), soft_cap(30.0f), custom_mask(), rope()};
  for (const char* arch : {"75", "80", "86", "89", "90a", "100", "120"}) {
    for (const auto& dim : dims) {
      for (const Dtype dtype : {Dtype::kFloat16, Dtype::kFloat32}) {
        for (const Dtype dtype_kv : {dtype, Dtype::kE4m3}) {
          for (const Variant& variant : variants) {
            for (const int group_size : {1, 8}) {
              SCOPED_TRACE(concat("sm_", arch, ", ", dim.qk, " x ", dim.vo, ", ", to_string(dtype),
                                  " and ", to_string(dtype_kv), ", ", variant.name(), ", group ",
                                  group_size));
              AttentionConfig config;
              config.num_kv_heads = 4;
              config.num_qo_heads = 4 * group_size;
              config.head_dim_qk = dim.qk;
              config.head_dim_vo = dim.vo;
              config.dtype = dtype;
              config.kv_dtype = dtype_kv;
              config.device = {kCuda, 0};
              config.variant = variant;
              config.chunk_keys = 512;
              expect_same_bits(config, arch);
              if (testing::Test::HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace plait::cuda
