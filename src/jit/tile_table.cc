// The table that justifies the choice of tiles: what every tile of the sm80 template takes, by the
// model that chooses and by the compiler.
#include <algorithm>
#include <map>
#include <utility>

#include "cuda/tile_choice.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "plait/error.h"

namespace plait {

std::vector<TileRow> tile_table(const std::string& arch, int head_dim) {
  const std::vector<std::string> known = shipped_architectures();
  check(std::find(known.begin(), known.end(), arch) != known.end() && arch != "75", "arch is '",
        arch, "'; the sm80 template is for 80, 86, 89, 90a, 100 and 120");
  check(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, "head_dim is ", head_dim,
        "; it must be a multiple of 8 up to 256");
  jit::nvrtc();  // not found: before all else
  std::vector<TileRow> rows;
  for (const int tile_q : {1, 16, 32, 64, 128}) {
    const cuda::TileQuery query{
        arch, Dtype::kBfloat16, head_dim, head_dim, Loader::kGather, tile_q, tile_q};
    const KernelConfig chosen = cuda::choose_tiles(query);
    std::map<std::pair<int, int>, cuda::TileCandidate> best;  // by tile_kv and stages
    for (const cuda::TileCandidate& candidate : cuda::tile_candidates(query, tile_q)) {
      const KernelConfig& config = candidate.config;
      if (config.num_shapes > 1) continue;
      const auto [at, is_new] = best.try_emplace({config.tile_kv, config.num_stages}, candidate);
      if (!is_new && candidate.score < at->second.score) at->second = candidate;
    }
    for (const auto& [key, candidate] : best) {
      const KernelConfig& config = candidate.config;
      const jit::KernelSource source = jit::assemble_attention(config, full());
      const jit::KernelResources resources = jit::compile_cubin_uncached(source, arch).resources;
      rows.push_back({.tile = concat(tile_q, "x", config.tile_kv, "x", config.num_stages),
                      .num_warps = config.num_warps,
                      .ctas_per_sm = candidate.ctas_per_sm,
                      .smem_bytes = candidate.smem_bytes,
                      .estimated_registers = candidate.registers,
                      .registers = resources.registers,
                      .spill_bytes = resources.spill_bytes,
                      .clocks_per_key = candidate.score,
                      .chosen = chosen.shapes[0].tile_q == tile_q &&
                                chosen.tile_kv == config.tile_kv &&
                                chosen.num_stages == config.num_stages});
    }
  }
  return rows;
}

}  // namespace plait
