// The table that justifies the choice of tiles: what every tile of the sm80 and the sm90 template
// takes, by the model that chooses and by the compiler.
#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <thread>
#include <utility>

#include "cuda/kernel_choice.h"
#include "cuda/sm90_tiles.h"
#include "cuda/tile_choice.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "plait/error.h"
#include "sm90/smem.h"

namespace plait {
namespace {

struct Entry {
  KernelConfig config;
  TileRow row;
};

// The best number of warps of each tile.
void add_sm80(const std::string& arch, int head_dim_qk, int head_dim_vo, std::vector<Entry>& to) {
  for (const int tile_q : {1, 16, 32, 64, 128}) {
    const cuda::TileQuery query{
        arch, Dtype::kBfloat16, head_dim_qk, head_dim_vo, Loader::kGather, tile_q, tile_q};
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
      TileRow row;
      row.kernel = concat("sm80 ", tile_q, "x", config.tile_kv, "x", config.num_stages);
      row.tile_q = tile_q;
      row.num_warps = config.num_warps;
      row.ctas_per_sm = candidate.ctas_per_sm;
      row.smem_bytes = candidate.smem_bytes;
      row.wanted_registers = candidate.registers;
      row.clocks_per_key = candidate.score;
      row.chosen = chosen.shapes[0].tile_q == tile_q && chosen.tile_kv == config.tile_kv &&
                   chosen.num_stages == config.num_stages;
      to.push_back({config, row});
    }
  }
}

void add_sm90(int head_dim_qk, int head_dim_vo, std::vector<Entry>& to) {
  constexpr int kMostStages = 4;
  for (const int tile_q : {16, 64, 128, 192}) {
    KernelConfig chosen =
        cuda::sm90_config(Dtype::kBfloat16, head_dim_qk, head_dim_vo, Loader::kPaged, tile_q);
    if (tile_q > 128) chosen = cuda::with_third_warpgroup(chosen, false);
    const std::vector<KernelConfig> tiles = cuda::sm90_tiles(chosen, tile_q);
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      const KernelConfig& config = tiles[i];
      const bool most = i + 1 == tiles.size() || tiles[i + 1].tile_kv != config.tile_kv ||
                        config.num_stages == kMostStages;
      const bool is_chosen = to_string(cuda::tile_of(config)) == to_string(cuda::tile_of(chosen));
      if (!is_chosen && (config.num_stages > kMostStages || !(most || config.num_stages == 2)))
        continue;
      TileRow row;
      row.kernel = concat("sm90 ", to_string(cuda::tile_of(config)));
      row.tile_q = config.shapes[0].tile_q;
      row.num_warps = 4 * (config.num_consumer_warpgroups + 1);
      row.ctas_per_sm = config.ctas_per_sm;
      row.smem_bytes = sm90_smem_bytes(config);
      row.registers = config.consumer_registers;
      row.wanted_registers = cuda::fragment_registers(config);
      row.chosen = is_chosen;
      to.push_back({config, row});
    }
  }
}

// On all cores: one takes seconds for a dozen.
void compile_all(const std::string& arch, std::vector<Entry>& entries) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  const auto work = [&] {
    for (std::size_t i; (i = next++) < entries.size();) {
      try {
        const jit::KernelSource source = jit::assemble_attention(entries[i].config, full());
        const jit::KernelResources found = jit::compile_cubin_uncached(source, arch).resources;
        entries[i].row.spill_bytes = found.spill_bytes;
        if (entries[i].row.registers == 0) entries[i].row.registers = found.registers;
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::min(16u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace

std::vector<TileRow> tile_table(const std::string& arch, int head_dim_qk, int head_dim_vo) {
  const std::vector<std::string> known = shipped_architectures();
  check(std::find(known.begin(), known.end(), arch) != known.end() && arch != "75", "arch is '",
        arch, "'; the sm80 template is for 80, 86, 89, 90a, 100 and 120");
  for (const int head_dim : {head_dim_qk, head_dim_vo}) {
    check(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, "head_dim is ", head_dim,
          "; it must be a multiple of 8 up to 256");
  }
  jit::nvrtc();  // not found: before all else
  std::vector<Entry> entries;
  add_sm80(arch, head_dim_qk, head_dim_vo, entries);
  if (arch == "90a") add_sm90(head_dim_qk, head_dim_vo, entries);
  compile_all(arch, entries);
  std::vector<TileRow> rows;
  for (Entry& entry : entries) rows.push_back(std::move(entry.row));
  return rows;
}

}  // namespace plait
