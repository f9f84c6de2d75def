#include "cuda/tile_choice.h"

#include <algorithm>
#include <cstdio>

#include "plait/error.h"
#include "sm80/layout.h"

namespace plait::cuda {
namespace {

// CUDA programming guide, "Technical specifications per compute capability"; memory: T4, A100 80
// GB, A40, Orin, 4090, H200, B200, 5090.
constexpr ArchLimits kLimits[] = {
    {75, 64 << 10, 64 << 10, 1024, 16, 5},     {80, 164 << 10, 163 << 10, 2048, 32, 13},
    {86, 100 << 10, 99 << 10, 1536, 16, 5},    {87, 164 << 10, 163 << 10, 1536, 16, 10},
    {89, 100 << 10, 99 << 10, 1536, 24, 3},    {90, 228 << 10, 227 << 10, 2048, 32, 20},
    {100, 228 << 10, 227 << 10, 2048, 32, 28}, {120, 100 << 10, 99 << 10, 1536, 24, 5},
};

constexpr int kTileQ[] = {1, 16, 32, 64, 128};
constexpr int kTileKv[] = {32, 64, 128};
constexpr int kMaxStages = 4;
constexpr int kFewRows = 32;  // a tile of so few waits for memory, not for tensor cores
constexpr int kNumWarps[] = {2, 4, 8};

// Warps that share the rows of a tile, 0: the tile cannot be shared out so. A warp takes one or two
// blocks of 16 rows, and steps of 16 keys; on CUDA cores all take the one row, 8 keys at least.
int key_split(int tile_q, int tile_kv, int num_warps) {
  if (tile_q == 1) return tile_kv / num_warps >= 8 ? num_warps : 0;
  const int row_blocks = tile_q / 16;
  const int split = std::max(num_warps / row_blocks, 1);
  const int blocks_of_warp = row_blocks * split / num_warps;
  if (blocks_of_warp > 2 || tile_kv / split < 16) return 0;
  if (blocks_of_warp == 2 && tile_kv / split > 64) return 0;  // spills, even with head_dim 64
  return split;
}

TileShape shape_of(int tile_q, int split) {
  return {tile_q == 1 ? Mma::kScalar : Mma::kMmaSync, tile_q, split};
}

// O and S in float32, and 56 for all else: what ptxas needs without spilling (128x64, head_dim 128:
// 192 of 255; 64x64: 96 of 168, three CTAs; `plait bench tiles` shows what it took).
int registers_of(const KernelConfig& c) {
  int most = 0;
  for (int i = 0; i < c.num_shapes; ++i) {
    const TileShape& shape = c.shapes[i];
    const int keys = c.tile_kv / shape.key_split;
    const int blocks = std::max(shape.tile_q * shape.key_split / (16 * c.num_warps), 1);
    most = std::max(most, blocks * (sm80::padded(c.head_dim_vo) + keys) / 2);
  }
  return most + 56;
}

int ctas_of(const ArchLimits& limits, const KernelConfig& c, int registers, int smem_bytes) {
  constexpr int kReservedBytes = 1024;
  if (registers > 255 || smem_bytes > limits.smem_cta_bytes) return 0;
  const int threads = sm80::num_threads(c);
  // More than 4 is never wanted: what a CTA costs by itself grows with it.
  return std::min({limits.smem_bytes / (smem_bytes + kReservedBytes),
                   kRegistersOfSm / (threads * ((registers + 7) / 8 * 8)),
                   limits.max_threads / threads, limits.max_ctas, 4});
}

// Clocks in which a multiprocessor makes 16-bit numbers of an fp8 key: once, into a tile, or in
// registers, by every warp with other rows. Half of a warp's lanes a clock do what it takes for a
// number: by SASS half an instruction that converts two and now and then a permutation of bytes, in
// a tile of bfloat16 two more; before sm_89 e4m3 takes seven for two.
float widening_clocks(const ArchLimits& limits, const KernelConfig& c, int dims, int row_warps) {
  if (!is_fp8(c.dtype_kv)) return 0.0f;
  const bool wide = c.num_wide_tiles > 0;
  const bool by_hand = c.dtype_kv == Dtype::kE4m3 && limits.arch < 89;
  const float of_number = by_hand ? 7.0f : wide ? 3.0f : 1.25f;
  return of_number * dims * (wide ? 1 : row_warps) / 128;
}

// Clocks a multiprocessor needs for one key of a tile of shape `i`, as if it had nothing else to
// do: the slowest of tensor cores, shared memory, conversions and what K and V come from: memory
// where rows are few, else the L2 cache, since other tiles read the same keys.
float clocks_per_key(const ArchLimits& limits, const TileCandidate& candidate, int i, bool few) {
  const KernelConfig& c = candidate.config;
  const TileShape& shape = c.shapes[i];
  const int dims = sm80::padded(c.head_dim_qk) + sm80::padded(c.head_dim_vo);
  const int rows = std::max(shape.tile_q, 16);
  const int row_warps = c.num_warps / shape.key_split;
  const int keys_of_warp = c.tile_kv / shape.key_split;
  const float key_bytes = 2.0f * dims, copied_bytes = 1.0f * bytes_of(c.dtype_kv) * dims;
  // 1024 multiply-adds a clock. A warp reads Q once a tile of its keys, K and V are read by every
  // warp with other rows, and written once: 128 bytes a clock.
  const float tensor = rows * dims / 1024.0f;
  const float q_bytes = 2.0f * rows * sm80::padded(c.head_dim_qk) / keys_of_warp;
  // fp8 that becomes a tile of 16 bits is read once more for it.
  const bool wide = c.num_wide_tiles > 0;
  const float widened_bytes = wide ? copied_bytes + key_bytes : 0.0f;
  const float read_bytes = row_warps * (wide ? key_bytes : copied_bytes);
  const float shared = (copied_bytes + widened_bytes + read_bytes + q_bytes) / 128;
  // An H200 wants 80 KiB under way for its 20 bytes a clock (cp.async over a paged cache: 64 KiB
  // 250 us, 96 KiB 242, 128 KiB 241, 192 KiB 239), the L2 cache 48 for its 33. Three quarters of a
  // tile of the ring, there a half, are being read. With more, multiprocessors that read memory
  // faster run ahead of the others: 64 x 4096 decoded with 80 KiB, 120, 144: 247 to 251 us, 260,
  // 266; of fp8 132 us, 144, 148.
  constexpr float kMemoryLatency = 80 * 1024 / 20.0f, kCacheLatency = 48 * 1024 / 33.0f;
  constexpr float kTooMuch = 0.1f;
  const float rate = few ? limits.memory_bytes_per_clock : 33.0f;
  const float wanted = rate * (few ? kMemoryLatency : kCacheLatency);
  const float read = few ? 0.75f : 0.5f;
  const float under_way = candidate.ctas_per_sm * (c.num_stages - read) * c.tile_kv * copied_bytes;
  const float excess = few ? std::max(under_way / wanted - 1, 0.0f) : 0.0f;
  const float memory =
      copied_bytes / rate * (std::max(1.0f, wanted / under_way) + kTooMuch * excess);
  // Barriers, softmax and the heads and tails of products, which other warps may cover: eight do.
  const float overhead = few ? 200 : 400;
  const float overlap = std::min(candidate.ctas_per_sm * c.num_warps / 8.0f, 2.0f);
  return std::max({tensor, shared, memory, widening_clocks(limits, c, dims, row_warps)}) +
         overhead / (c.tile_kv * overlap * candidate.ctas_per_sm);
}

// Many rows are for the first shape, few for the last; where the kernel meets both, both count.
float score(const ArchLimits& limits, const TileCandidate& candidate, bool meets_both) {
  const KernelConfig& c = candidate.config;
  const bool few = c.shapes[0].tile_q <= kFewRows;
  float clocks = clocks_per_key(limits, candidate, 0, few);
  if (meets_both) clocks += clocks_per_key(limits, candidate, c.num_shapes - 1, true);
  return clocks;
}

TileCandidate make_candidate(const TileQuery& query, const ArchLimits& limits, int tile_q,
                             int few_rows, int tile_kv, int stages, int num_warps, int wide_tiles,
                             bool meets_both) {
  TileCandidate candidate{};
  KernelConfig& c = candidate.config;
  c.dtype_q = c.dtype_out = query.dtype;
  c.dtype_kv = query.dtype_kv.value_or(query.dtype);
  c.head_dim_qk = query.head_dim_qk;
  c.head_dim_vo = query.head_dim_vo;
  c.loader = query.loader;
  c.tile_kv = tile_kv;
  c.num_stages = stages;
  c.num_warps = num_warps;
  c.num_wide_tiles = wide_tiles;
  // Transforms rewrite 16-bit tiles; those of 16-bit K and V are there.
  if (is_fp8(c.dtype_kv) ? query.transforms_kv && wide_tiles == 0 : wide_tiles > 0) {
    return candidate;
  }
  c.num_shapes = 1;
  const int split = key_split(tile_q, tile_kv, num_warps);
  if (split == 0 || 32 * num_warps < tile_kv) return candidate;
  if (query.chunk_keys > 0) {
    if (tile_q < 16 || split > 1 || few_rows > 0 || tile_kv != kInvariantTileKv) return candidate;
    // Products of a 16-bit tile are of Q's dtype, those of fp8 in registers of float16.
    if ((wide_tiles > 0) != (is_fp8(c.dtype_kv) && query.transforms_kv)) return candidate;
    c.chunk_keys = query.chunk_keys;
  }
  // Two warps hide too little of what each other does: only where four cannot share the tile out.
  const bool four_can =
      query.chunk_keys > 0 ? key_split(tile_q, tile_kv, 4) == 1 : key_split(tile_q, tile_kv, 4) > 0;
  if (num_warps == 2 && four_can) return candidate;
  c.shapes[0] = shape_of(tile_q, split);
  if (few_rows > 0) {
    const int few_split = key_split(few_rows, tile_kv, num_warps);
    if (few_split == 0) return candidate;
    c.num_shapes = 2;
    c.shapes[1] = shape_of(few_rows, few_split);
  }
  candidate.registers = registers_of(c);
  candidate.smem_bytes = sm80_smem_bytes(c);
  candidate.ctas_per_sm = ctas_of(limits, c, candidate.registers, candidate.smem_bytes);
  c.ctas_per_sm = candidate.ctas_per_sm;
  if (candidate.ctas_per_sm > 0) candidate.score = score(limits, candidate, meets_both);
  return candidate;
}

const TileCandidate* best_of(const std::vector<TileCandidate>& candidates) {
  const TileCandidate* best = nullptr;
  for (const TileCandidate& candidate : candidates) {
    if (best == nullptr || candidate.score < best->score) best = &candidate;
  }
  return best;
}

}  // namespace

ArchLimits limits_of(const std::string& arch) {
  const int number = std::atoi(arch.c_str());
  ArchLimits found = kLimits[0];
  for (const ArchLimits& limits : kLimits) {
    if (limits.arch <= number) found = limits;
  }
  return found;
}

int choose_tile_q(long long average_rows, long long most_rows) {
  for (const int tile_q : kTileQ) {
    if (tile_q == 1 && most_rows > 1) continue;
    if (tile_q >= average_rows) return tile_q;
  }
  return 128;
}

std::vector<TileCandidate> tile_candidates(const TileQuery& query, int tile_q) {
  const ArchLimits limits = limits_of(query.arch);
  // A second shape for row blocks, or rests of them, that fill a small part of the first.
  const bool meets_both = tile_q > kFewRows;
  std::vector<TileCandidate> candidates;
  for (const int few_rows : {16, 32, 0}) {
    if (meets_both ? few_rows >= tile_q : few_rows > 0) continue;
    for (const int tile_kv : kTileKv) {
      for (const int num_warps : kNumWarps) {
        for (int stages = 1; stages <= kMaxStages; ++stages) {
          for (const int wide_tiles : {0, 1}) {
            const TileCandidate candidate =
                make_candidate(query, limits, tile_q, few_rows, tile_kv, stages, num_warps,
                               wide_tiles, meets_both);
            if (candidate.ctas_per_sm > 0) candidates.push_back(candidate);
          }
        }
      }
    }
  }
  return candidates;
}

KernelConfig choose_tiles(const TileQuery& query) {
  int wanted = choose_tile_q(query.average_rows, query.most_rows);
  if (query.chunk_keys > 0) wanted = std::max(wanted, 32);  // of two warps
  for (int i = static_cast<int>(std::size(kTileQ)) - 1; i >= 0; --i) {
    if (kTileQ[i] > wanted) continue;
    const std::vector<TileCandidate> candidates = tile_candidates(query, kTileQ[i]);
    if (const TileCandidate* best = best_of(candidates)) return best->config;
  }
  fail("no tile of the sm80 template fits head_dim_qk ", query.head_dim_qk, " and head_dim_vo ",
       query.head_dim_vo, " on sm_", query.arch);
}

KernelConfig forced_tile(const TileQuery& query, const std::string& text) {
  int tile_q = 0, tile_kv = 0, stages = 0, length = 0;
  const int fields = std::sscanf(text.c_str(), "%dx%dx%d%n", &tile_q, &tile_kv, &stages, &length);
  const auto is_one_of = [](const auto& values, int value) {
    return std::find(std::begin(values), std::end(values), value) != std::end(values);
  };
  check(fields == 3 && length == static_cast<int>(text.size()) && is_one_of(kTileQ, tile_q) &&
            is_one_of(kTileKv, tile_kv) && stages >= 1 && stages <= kMaxStages,
        "attention: kernel is 'sm80 ", text,
        "'; a tile is written tile_q x tile_kv x stages, as in 'sm80 128x64x2': 1, 16, 32, 64 or "
        "128, then 32, 64 or 128, then 1 to ",
        kMaxStages);
  std::vector<TileCandidate> candidates;
  for (const int num_warps : kNumWarps) {
    for (const int wide_tiles : {0, 1}) {
      const TileCandidate candidate = make_candidate(query, limits_of(query.arch), tile_q, 0,
                                                     tile_kv, stages, num_warps, wide_tiles, false);
      if (candidate.ctas_per_sm > 0) candidates.push_back(candidate);
    }
  }
  const TileCandidate* best = best_of(candidates);
  check(best != nullptr, "attention: kernel is 'sm80 ", text, "', which with head_dim_qk ",
        query.head_dim_qk, " and head_dim_vo ", query.head_dim_vo,
        " needs more registers or shared memory than sm_", query.arch,
        " has; take a smaller tile or fewer stages");
  return best->config;
}

}  // namespace plait::cuda
