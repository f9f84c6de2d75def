#include "cuda/sm90_tiles.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

#include "cuda/kernel_choice.h"
#include "host_device/convert.h"
#include "plait/error.h"
#include "sm90/smem.h"

namespace plait::cuda {
namespace {

constexpr int kMostKeys = 256;  // of one wgmma
constexpr int kMinStages = 2, kMaxStages = 8;
constexpr int kRegistersOfWarpgroups = 4 * 128;               // of a thread of each of four
constexpr int kSmemOfSm = 228 * 1024, kReservedBytes = 1024;  // reserved: of a CTA

// What a thread has for addresses, states and masks at the least; with less, ptxas spills in the
// main loop by the hundred bytes.
constexpr int kOtherRegisters = 24;

bool is_one_of_tile_q(int rows) {
  return rows == 16 || rows == 32 || rows == 64 || rows == 128 || rows == 192;
}

}  // namespace

std::string to_string(const Sm90Tile& tile) {
  return concat(tile.tile_q, "x", tile.tile_kv, "x", tile.num_stages);
}

Sm90Tile tile_of(const KernelConfig& sm90) {
  return {sm90.shapes[0].tile_q, sm90.tile_kv, sm90.num_stages};
}

Sm90Tile parse_sm90_tile(const std::string& text) {
  Sm90Tile tile{};
  int length = 0;
  const int fields = std::sscanf(text.c_str(), "%dx%dx%d%n", &tile.tile_q, &tile.tile_kv,
                                 &tile.num_stages, &length);
  check(fields == 3 && length == static_cast<int>(text.size()) && is_one_of_tile_q(tile.tile_q) &&
            tile.tile_kv % 16 == 0 && tile.tile_kv >= 16 && tile.tile_kv <= kMostKeys &&
            tile.num_stages >= kMinStages && tile.num_stages <= kMaxStages,
        "attention: kernel is 'sm90 ", text,
        "'; a tile is written tile_q x tile_kv x stages, as in 'sm90 128x144x2': 16, 32, 64, "
        "128 or 192, then a multiple of 16 up to ",
        kMostKeys, ", then ", kMinStages, " to ", kMaxStages);
  return tile;
}

int fragment_registers(const KernelConfig& c) {
  return sm90::padded_dim(c.head_dim_vo) / 2 + c.tile_kv / 2 + c.tile_kv / 4;
}

KernelConfig with_tile(KernelConfig c, const Sm90Tile& tile) {
  c.tile_kv = tile.tile_kv;
  c.num_stages = tile.num_stages;
  if (tile.tile_q > 128) {  // a third consumer warpgroup
    // Of a producer that transforms rows: enough for RoPE alone, and leaves consumers 144.
    constexpr int kMostOfProducer = 80;
    c.producer_registers = std::min(c.producer_registers, kMostOfProducer);
    c.num_consumer_warpgroups = 3;
    c.consumer_registers = (kRegistersOfWarpgroups - c.producer_registers) / 3 / 8 * 8;
    c.shapes[0].tile_q = tile.tile_q;
  }
  if (c.num_shapes > 1) {  // as many parts of the keys as check_config of sm90/attention.cuh takes
    int split = sm90::loads_apart(c) ? c.num_consumer_warpgroups : 2;
    while (c.num_stages % split != 0) --split;
    c.num_shapes = split > 1 ? 2 : 1;
    c.shapes[1] = split > 1 ? TileShape{Mma::kWgmma, 64, split} : TileShape{};
  }
  const auto fits = [&] {
    if (is_fp8(c.dtype_kv)) {
      c = with_landing_ring(c);
      if (c.num_landing_stages == 0) return false;
    }
    return c.ctas_per_sm * (sm90_smem_bytes(c) + kReservedBytes) <= kSmemOfSm &&
           fragment_registers(c) + kOtherRegisters <= c.consumer_registers;
  };
  if (fits()) return c;
  if (c.ctas_per_sm > 1) {  // the small kernel: one buffer of Q, or the multiprocessor to itself
    const int q_stages = std::exchange(c.num_q_stages, 1);
    if (fits()) return c;
    c.num_q_stages = q_stages;
    c.ctas_per_sm = 1;
    c.producer_registers = 96;
    c.consumer_registers = 240;
    if (fits()) return c;
  }
  // One buffer of Q: units do not overlap. The join of split keys needs two.
  c.num_q_stages = 1;
  if (sm90::splits_keys(c)) {
    c.num_shapes = 1;
    c.shapes[1] = {};
  }
  if (fits()) return c;
  c.ctas_per_sm = 0;
  return c;
}

std::vector<KernelConfig> sm90_tiles(const KernelConfig& sm90, int tile_q) {
  std::vector<KernelConfig> tiles;
  for (int tile_kv = 32; tile_kv <= kMostKeys; tile_kv += 16) {
    for (int stages = kMinStages; stages <= kMaxStages; ++stages) {
      const KernelConfig c = with_tile(sm90, {tile_q, tile_kv, stages});
      if (c.ctas_per_sm > 0) tiles.push_back(c);
    }
  }
  return tiles;
}

int kv_align(const KernelConfig& kernel, int page_size) {
  if (template_of(kernel) != Template::kSm90 || is_fp8(kernel.dtype_kv)) return kernel.tile_kv;
  const int align = std::lcm(16, page_size);
  return kernel.tile_kv % align == 0 ? align : kernel.tile_kv;
}

}  // namespace plait::cuda
