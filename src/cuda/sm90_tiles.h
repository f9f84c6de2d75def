// Tiles of the sm90 template by name, "128x144x2": packed query rows x keys x stages of the KV
// ring. For tuning, and for `plait bench tiles`, whose table justifies what sm90_config chooses.
// Pure functions.
#pragma once
#include <string>
#include <vector>

#include "host_device/config.h"

namespace plait::cuda {

struct Sm90Tile {
  int tile_q;  // 128: beside them, where two buffers of Q fit, a shape of 64 rows with split keys;
               // 16, 32 and 64: the small kernel; 192: three consumer warpgroups
  int tile_kv, num_stages;
};
std::string to_string(const Sm90Tile& tile);
Sm90Tile tile_of(const KernelConfig& sm90);

// Throws ArgumentError where `text` is none.
Sm90Tile parse_sm90_tile(const std::string& text);

// `sm90`, which sm90_config makes for row blocks of tile.tile_q rows, with another tile: two or
// one CTA a multiprocessor, two or one buffers of Q, the first that fits; else ctas_per_sm is 0.
KernelConfig with_tile(KernelConfig sm90, const Sm90Tile& tile);

// Registers of a consumer's thread for O, S and P. The loop needs 40 to 52 more without spilling.
int fragment_registers(const KernelConfig& sm90);

// All of with_tile() for tile_q rows and 32 and more keys that fit, by keys, then stages.
std::vector<KernelConfig> sm90_tiles(const KernelConfig& sm90, int tile_q);

// What a window's keys begin at a multiple of: with the sm90 template at 16 of them and a page (1:
// ragged), where that divides a tile.
int kv_align(const KernelConfig& kernel, int page_size);

}  // namespace plait::cuda
