// Which tiles the sm80 template works in: a choice in two steps, from the bounds and from what an
// architecture can hold, never from a batch. Pure functions; `plait bench tiles` prints the table.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "host_device/config.h"

namespace plait::cuda {

// Of one multiprocessor.
struct ArchLimits {
  int arch;            // 10 * major + minor
  int smem_bytes;      // for all its CTAs, each of which costs 1 KiB more than it asks for
  int smem_cta_bytes;  // the most that one can have
  int max_threads, max_ctas;
  float memory_bytes_per_clock;  // of the fastest memory that comes with it
};
inline constexpr int kRegistersOfSm = 65536;
// Of `arch` as NVRTC takes it ("90a"), or else of the newest older one that is known.
ArchLimits limits_of(const std::string& arch);

// What the choice of tiles follows from.
struct TileQuery {
  std::string arch;
  Dtype dtype;
  int head_dim_qk, head_dim_vo;
  Loader loader;
  long long average_rows;              // packed query rows of a row block, by the bounds
  long long most_rows;                 // that a row block may have
  std::optional<Dtype> dtype_kv = {};  // fp8; else dtype
  bool transforms_kv = false;          // functors rewrite rows of K or V
  int chunk_keys = 0;                  // invariant mode: kInvariantTileKv alone, and no split keys
};

// Keys of a tile in invariant mode, the same for every tile_q of a head dim: what leaves warps with
// rows of their own registers, and CTAs of 32 rows the shared memory of any architecture.
inline constexpr int kInvariantTileKv = 64;

// One way to do it, and what follows from it.
struct TileCandidate {
  KernelConfig config;
  int registers;    // of a thread: estimated, see registers_of
  int smem_bytes;   // of a CTA
  int ctas_per_sm;  // 0: does not fit
  float score;      // modelled clocks a multiprocessor needs for a key, less is better
};

// Step 1: the smallest tile_q that holds the average rows, 128 at most; 1 only where no row block
// has more.
int choose_tile_q(long long average_rows, long long most_rows);
// Step 2: every tile_kv, number of stages and of warps for that tile_q, beside which the kernel has
// a shape for few rows, with its score. In a fixed order.
std::vector<TileCandidate> tile_candidates(const TileQuery& query, int tile_q);
// Both: candidates, score, compare. Throws Error if nothing fits.
KernelConfig choose_tiles(const TileQuery& query);

// The configuration for "128x64x2" (tile_q x tile_kv x stages) and nothing else. Throws
// ArgumentError, naming `what`, where the text is none or the tile fits no CTA of the architecture.
KernelConfig forced_tile(const TileQuery& query, const std::string& text);

}  // namespace plait::cuda
