#include "cuda/kernel_choice.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cuda/sm90_tiles.h"
#include "cuda/tile_choice.h"
#include "host_device/convert.h"
#include "jit/jit.h"
#include "plait/error.h"
#include "sm90/smem.h"
#include "variants/functors.h"

namespace plait::cuda {

KernelConfig plain_config(Dtype dtype, int head_dim_qk, int head_dim_vo, Loader loader) {
  // 16 rows of float32 Q beside 32 keys fit the 48 KiB of static shared memory up to 192.
  const int tile_q = head_dim_qk <= 192 && head_dim_vo <= 192 ? 16 : 8;
  return {.dtype_q = dtype,
          .dtype_kv = dtype,
          .dtype_out = dtype,
          .head_dim_qk = head_dim_qk,
          .head_dim_vo = head_dim_vo,
          .loader = loader,
          .tile_kv = 64,
          .num_stages = 0,
          .num_q_stages = 0,
          .num_consumer_warpgroups = 0,
          .producer_registers = 0,
          .consumer_registers = 0,
          .ctas_per_sm = 4,
          .num_shapes = 1,
          .shapes = {{Mma::kScalar, tile_q, 1}}};
}

bool sm80_takes(Dtype dtype) { return dtype == Dtype::kBfloat16 || dtype == Dtype::kFloat16; }

bool sm90_takes(Dtype dtype) { return dtype == Dtype::kBfloat16 || dtype == Dtype::kFloat16; }

namespace {

// Whether the shared memory of a multiprocessor holds its CTAs.
bool fits(const KernelConfig& c) {
  constexpr int kSmemBytes = 228 * 1024, kReservedBytes = 1024;  // reserved: of a CTA
  return c.ctas_per_sm * (sm90_smem_bytes(c) + kReservedBytes) <= kSmemBytes;
}

// Keys of a tile of fp8, beside two stages of tiles: as many as leave the landing ring two stages
// (one H200, 64 x 4096 decoded with 64, 48 and 32 keys: 249.8, 273.0, 336.8 us). Where none does, Q
// has one buffer, or the CTA a multiprocessor to itself.
KernelConfig with_fp8(KernelConfig config, Dtype dtype_kv) {
  constexpr int kWantedStages = 2;
  config.dtype_kv = dtype_kv;
  config.num_stages = 2;
  for (;;) {
    for (int keys = 64; keys >= 32; keys -= 16) {
      config.tile_kv = keys;
      config = with_landing_ring(config);
      if (config.num_landing_stages >= kWantedStages) break;
    }
    if (config.num_landing_stages > 0) return config;
    if (config.ctas_per_sm == 1 && config.num_q_stages == 1) fail("sm90: no tile of fp8 fits");
    if (config.ctas_per_sm > 1) {
      config.ctas_per_sm = 1;
      config.producer_registers = 96;
      config.consumer_registers = 240;
    } else {
      config.num_q_stages = 1;
    }
  }
}

// Keys of a tile: as many as S and P beside O leave registers for, by the panels of 64 columns that
// a row of V takes, and as leave two stages beside Q. Spilled: 128 rows x 96 keys for 192 with a
// soft cap, x 64 for 256.
int sm90_tile_kv(KernelConfig config, bool decode_only) {
  const int panels = sm90::panels_of(config.head_dim_vo);
  const int most = decode_only ? (panels == 3 ? 32 : 64) : panels > 3 ? 48 : panels > 2 ? 64 : 128;
  config.num_stages = 2;
  for (const int keys : {128, 96, 64, 48}) {
    config.tile_kv = keys;
    if (keys <= most && fits(config)) return keys;
  }
  return 32;
}

}  // namespace

KernelConfig sm90_config(Dtype dtype, int head_dim_qk, int head_dim_vo, Loader loader,
                         long long max_rows, std::optional<Dtype> dtype_kv) {
  const bool decode_only = max_rows <= 64;
  KernelConfig config{
      .dtype_q = dtype,
      .dtype_kv = dtype,
      .dtype_out = dtype,
      .head_dim_qk = head_dim_qk,
      .head_dim_vo = head_dim_vo,
      .loader = loader,
      .tile_kv = 0,
      .num_stages = 2,
      .num_q_stages = 2,
      .num_consumer_warpgroups = 2,
      // 504 for three warpgroups in all. The producer, which reads items and block tables, spills
      // at 40; the gather kernel's consumers at 208, with a soft cap at 216.
      .producer_registers = 56,
      .consumer_registers = 224,
      .ctas_per_sm = 1,
      .num_shapes = 2,
      .shapes = {{Mma::kWgmma, 128, 1}, {Mma::kWgmma, 64, 2}}};
  if (decode_only) {
    config.num_consumer_warpgroups = 1;
    config.producer_registers = 72;
    config.consumer_registers = 184;
    config.ctas_per_sm = 2;
    if (head_dim_vo >
        192) {  // two CTAs have 128 registers each as ptxas counts, O alone takes them
      config.producer_registers = 96;
      config.consumer_registers = 240;
      config.ctas_per_sm = 1;
    }
    config.num_shapes = 1;
    config.shapes[1] = {};
    config.shapes[0] = {Mma::kWgmma, max_rows <= 16 ? 16 : max_rows <= 32 ? 32 : 64, 1};
  }
  if (dtype_kv && is_fp8(*dtype_kv)) return with_fp8(config, *dtype_kv);
  config.tile_kv = sm90_tile_kv(config, decode_only);
  if (!fits(config)) {
    config.num_q_stages = 1;
    config.tile_kv = sm90_tile_kv(config, decode_only);
  }
  // As many stages as fit, up to the bytes in flight that saturate memory; with split keys an even
  // number (check_config of sm90/attention.cuh).
  constexpr int kMaxStages = 4;
  const int step = sm90::splits_keys(config) ? 2 : 1;
  for (KernelConfig more = config; more.num_stages <= kMaxStages && fits(more);
       more.num_stages += step) {
    config.num_stages = more.num_stages;
  }
  return config;
}

KernelConfig with_even_reads(KernelConfig sm90) {
  constexpr int kBytesUnderWay = 64 * 1024;
  const auto under_way = [](const KernelConfig& c) {
    return c.num_stages * (sm90::tile_bytes(c.tile_kv, c.head_dim_qk) +
                           sm90::tile_bytes(c.tile_kv, c.head_dim_vo));
  };
  if (sm90.ctas_per_sm == 1 || is_fp8(sm90.dtype_kv)) return sm90;
  while (sm90.num_stages > 2 && under_way(sm90) > kBytesUnderWay) --sm90.num_stages;
  return sm90;
}

KernelConfig with_landing_ring(KernelConfig sm90) {
  constexpr int kMinStages = 2, kMaxStages = 6;  // K runs one tile ahead of V
  for (int stages = kMaxStages; stages >= kMinStages; --stages) {
    sm90.num_landing_stages = stages;
    if (fits(sm90)) return sm90;
  }
  sm90.num_landing_stages = 0;
  return sm90;
}

KernelConfig with_row_transforms(KernelConfig sm90) {
  // RoPE of four rows side by side takes 88, RMS norm before it 104. Consumers of such variants,
  // without functors of their own, are content with the rest of what the CTA has (check_config of
  // sm90/attention.cuh).
  constexpr int kProducer = 104, kMostOfConsumer = 240;
  if (sm90.producer_registers >= kProducer) return sm90;
  const int warpgroups = sm90.num_consumer_warpgroups + 1;
  const int all = 65536 / (128 * warpgroups * sm90.ctas_per_sm) / 8 * 8 * warpgroups;
  const int rest = (all - kProducer) / sm90.num_consumer_warpgroups / 8 * 8;
  sm90.producer_registers = kProducer;
  sm90.consumer_registers = std::min(rest, kMostOfConsumer);
  return sm90;
}

KernelConfig with_third_warpgroup(KernelConfig sm90, bool has_functors) {
  // One H200, 4 x 4096 causal, microseconds: d 128 992.8 (128 rows x 128 keys: 1021.3), d 64 666.9
  // (128 x 128: 720.8, 128 x 176: 702.0). Three softmaxes hide behind each other's products better
  // than two, and K and V are read for more rows.
  const int panels = std::max(sm90::panels_of(sm90.head_dim_qk), sm90::panels_of(sm90.head_dim_vo));
  if (panels > 2) return sm90;
  // With pages all three split the keys of few rows; see check_config of sm90/attention.cuh.
  // Beside functors a join of three would spill.
  const int split = sm90::loads_apart(sm90) && !has_functors ? 3 : 2;
  // Consumers beside a producer that transforms rows have registers for 64 keys. Three stages, in
  // which no keys are split, are then faster than two: RoPE, 4 x 4096 causal 1553 us, 1612.
  KernelConfig unsplit = sm90;
  unsplit.num_shapes = 1;
  unsplit.shapes[1] = {};
  const int tile_kv = panels == 1 ? 112 : 80;
  for (const KernelConfig& wide :
       {with_tile(sm90, {192, tile_kv, 2 * split}), with_tile(sm90, {192, tile_kv, split}),
        with_tile(unsplit, {192, 64, 3})}) {
    if (wide.ctas_per_sm > 0 && wide.num_q_stages == sm90.num_q_stages) return wide;
  }
  return sm90;
}

namespace {

bool has_functor(const Variant& variant, const char* name) {
  return std::any_of(variant.parts.begin(), variant.parts.end(), [&](const VariantPart& part) {
    const std::vector<std::string> functors = jit::functors_of(part);
    return std::find(functors.begin(), functors.end(), name) != functors.end();
  });
}

bool computes_powers(const Variant& variant) {
  return std::any_of(variant.parts.begin(), variant.parts.end(), [](const VariantPart& part) {
    return computes_powers_in(jit::text_of(part));
  });
}

bool transforms_kv(const Variant& variant) {
  return has_functor(variant, "key_transform") || has_functor(variant, "value_transform");
}
bool transforms_rows(const Variant& variant) {
  return has_functor(variant, "query_transform") || transforms_kv(variant);
}

// Whether a third consumer warpgroup leaves the producer registers for the variant's row
// transforms: RoPE's it does.
bool takes_third_warpgroup(const Variant& variant) {
  const bool is_rope = variant.parts.size() == 1 && variant.parts[0].name == "rope";
  return !variant.custom_mask() && (is_rope || !transforms_rows(variant));
}

// The packed rows of the largest row block of these bounds. A level of a composed format collects
// the queries of many requests; where each has few rows, as in decode, the tiles are those of few
// rows all the same. One H200, microseconds of 192 x 80 with 64 x 80, and of 64 x 64: 64 requests
// of 8192 shared and 256 own keys 75.4, 51.8; 256 of 4096 and 128 203.4, 98.3.
long long max_rows(const AttentionConfig& config) {
  constexpr long long kFewRows = 64;
  const Bounds& b = config.bounds;
  const long long group_size = config.num_qo_heads / config.num_kv_heads;
  const long long of_request = group_size * b.longest_q(), all = group_size * b.query_tokens;
  if (config.kv.num_levels == 1) return of_request;
  return of_request <= kFewRows ? std::min(all, kFewRows) : all;
}

// Whether bounds are such that tiles of 192 rows are the faster ones. One H200, d 128, microseconds
// of 192 and 128 rows: 4 x 4096 causal 931, 985, without a mask 1786, 1902, 16 x 1024 314, 336; but
// 8 x 512 queries over 8192 keys, five tiles a multiprocessor, 993, 940.
bool wants_third_warpgroup(const AttentionConfig& config) {
  constexpr long long kMultiprocessors = 132, kFewTiles = 8;
  const Bounds& b = config.bounds;
  const long long group_size = config.num_qo_heads / config.num_kv_heads;
  const long long rows = b.query_tokens * group_size;
  const bool as_full = 2 * rows_per_tile(192, static_cast<int>(group_size)) >=
                       3 * rows_per_tile(128, static_cast<int>(group_size));
  const bool decodes_too = rows <= 192LL * std::max(b.requests, 1);
  const bool many_tiles = rows * config.num_kv_heads >= kFewTiles * kMultiprocessors * 192;
  return max_rows(config) > 128 && as_full && (many_tiles || decodes_too);
}

// Where 192 rows would be taken, but what the variant does to logits are sums and products. One
// H200, 4 x 4096 causal, d 128, microseconds of 192 x 80 and 128 x 160: ALiBi 1112, 1085; but soft
// cap, whose powers hide behind the products of two other warpgroups, 1297, 1392.
bool wants_long_tile(const AttentionConfig& config) {
  return config.head_dim_qk == 128 && config.head_dim_vo == 128 &&
         has_functor(config.variant, "logits_transform") && !computes_powers(config.variant);
}

// Whether sm_90a decodes in the sm80 template. wgmma reads K and V from shared memory, where fp8 is
// written as it lands, read, written in 16 bits and read again: 896 cycles of its 128 bytes for 64
// keys of head_dim 128, Q included, and 4130 instructions of all warps (one H200, 64 x 4096: 250
// us). mma.sync takes them from registers: 320 cycles, 1600 instructions.
bool widens_in_registers(const AttentionConfig& config) {
  return is_fp8(config.dtype_kv()) && !transforms_kv(config.variant) && max_rows(config) <= 16;
}

TileQuery tile_query(const AttentionConfig& config, const std::string& arch, Loader loader) {
  const long long group_size = config.num_qo_heads / config.num_kv_heads;
  const Bounds& bounds = config.bounds;
  TileQuery query{.arch = arch,
                  .dtype = config.dtype,
                  .head_dim_qk = config.head_dim_qk,
                  .head_dim_vo = config.head_dim_vo,
                  .loader = loader,
                  .average_rows = 0,
                  .most_rows = bounds.longest_q() * group_size,
                  .dtype_kv = config.dtype_kv(),
                  .transforms_kv = transforms_kv(config.variant),
                  .chunk_keys = config.chunk_keys};
  const long long requests = std::max(bounds.requests, 1);
  const long long average_len =
      std::min<long long>((bounds.query_tokens + requests - 1) / requests, bounds.longest_q());
  query.average_rows = average_len * group_size;
  if (config.kv.num_levels > 1) query.average_rows = query.most_rows = max_rows(config);
  return query;
}

bool is_sm80(const std::string& kernel) {
  return kernel == "sm80" || kernel.rfind("sm80 ", 0) == 0;
}
bool is_sm90(const std::string& kernel) {
  return kernel == "sm90a" || kernel.rfind("sm90 ", 0) == 0;
}

void check_sm90_tile(const AttentionConfig& config, const KernelConfig& kernel) {
  check(kernel.ctas_per_sm > 0, "attention: kernel is '", config.kernel,
        "', which with head_dim_qk ", config.head_dim_qk, " and head_dim_vo ", config.head_dim_vo,
        " needs ", sm90_smem_bytes(kernel), " bytes of shared memory and ",
        fragment_registers(kernel), " of ", kernel.consumer_registers,
        " registers for O, S and P alone, more than sm_90a has; take fewer keys or stages");
  constexpr int kMostMaskedKeys = 128;  // a thread's mask bits of a row are one word (mask_bits.h)
  check(!config.variant.custom_mask() || kernel.tile_kv <= kMostMaskedKeys,
        "attention: kernel is '", config.kernel, "', and variant '", config.variant.name(),
        "' takes mask bits of at most ", kMostMaskedKeys, " keys a tile");
}

// Invariant mode: keys of a tile by head dims, the same for any rows. Decode has the tile that it
// has anyway; prefill reads 64 rather than 80 or 128 keys a tile.
int invariant_tile_kv(const AttentionConfig& config) {
  const int panels =
      std::max(sm90::panels_of(config.head_dim_qk), sm90::panels_of(config.head_dim_vo));
  return panels <= 2 ? 64 : 32;
}

// `sm90` in invariant mode: one shape, whose warpgroups have rows of their own.
KernelConfig invariant_sm90(KernelConfig sm90, const AttentionConfig& config, bool wide) {
  sm90.num_shapes = 1;
  sm90.shapes[1] = {};
  const int tile_kv = invariant_tile_kv(config);
  const int most_stages = is_fp8(config.dtype_kv()) ? 2 : 4;
  KernelConfig best{};
  for (const int tile_q : {wide ? 192 : sm90.shapes[0].tile_q, sm90.shapes[0].tile_q}) {
    for (int stages = most_stages; stages >= 2; --stages) {
      const KernelConfig c = with_tile(sm90, {tile_q, tile_kv, stages});
      const bool as_wished =
          c.ctas_per_sm == sm90.ctas_per_sm && c.num_q_stages == sm90.num_q_stages;
      if (as_wished || (best.ctas_per_sm == 0 && c.ctas_per_sm > 0)) best = c;
      if (as_wished) break;
    }
    if (best.ctas_per_sm > 0) break;
  }
  if (best.ctas_per_sm == 0) fail("sm90: no tile of invariant mode fits");
  best.chunk_keys = config.chunk_keys;
  return best;
}

void check_invariant_tile(const AttentionConfig& config, int given, int taken) {
  check(given == taken, "attention: kernel is '", config.kernel, "', of ", given,
        " keys a tile; in invariant mode all tiles of head_dim_qk ", config.head_dim_qk,
        " and head_dim_vo ", config.head_dim_vo, " have ", taken, " keys");
}

}  // namespace

KernelConfig choose_kernel(const AttentionConfig& config, const std::string& arch) {
  const bool ragged = config.kv.kind == KvFormat::kRagged;
  const Loader copies = ragged ? Loader::kAffine : Loader::kGather;  // row by row
  const bool sm80_arch = std::atoi(arch.c_str()) >= 80;
  const bool fp8 = is_fp8(config.dtype_kv());
  // Rows of fp8 are copied in units of 16 bytes.
  const bool whole_rows = !fp8 || (config.head_dim_qk % 16 == 0 && config.head_dim_vo % 16 == 0);
  const bool sm80 = sm80_arch && sm80_takes(config.dtype) && whole_rows;
  const bool sm90 = sm90_takes(config.dtype) && whole_rows;
  if (is_sm80(config.kernel)) {
    check(sm80_arch, "kernel 'sm80' needs a GPU of compute capability 8.0 or later, ",
          to_string(config.device), " is sm_", arch, "; 'auto' and 'plain' run there");
    check(sm80_takes(config.dtype), "kernel 'sm80' takes bfloat16 and float16, not ",
          to_string(config.dtype), "; 'auto' and 'plain' run it");
    check(whole_rows, "kernel 'sm80' takes ", to_string(config.dtype_kv()),
          " in head dims of multiples of 16, not ", config.head_dim_qk, " and ", config.head_dim_vo,
          "; 'auto' and 'plain' run it");
  }
  if (is_sm90(config.kernel)) {
    check(arch == "90a", "kernel 'sm90a' needs a GPU of compute capability 9.0, ",
          to_string(config.device), " is sm_", arch, "; 'auto' and 'plain' run there");
    check(sm90_takes(config.dtype), "kernel 'sm90a' takes bfloat16 and float16, not ",
          to_string(config.dtype), "; 'auto' and 'plain' run it");
    check(whole_rows, "kernel 'sm90a' takes ", to_string(config.dtype_kv()),
          " in head dims of multiples of 16, not ", config.head_dim_qk, " and ", config.head_dim_vo,
          "; 'auto' and 'plain' run it");
  }
  const bool any = config.kernel == "auto";
  const bool invariant = config.chunk_keys > 0;  // then one template has all rows
  const bool decodes_on_sm80 = widens_in_registers(config) && !invariant;
  if (is_sm90(config.kernel) || (any && arch == "90a" && sm90 && !decodes_on_sm80)) {
    // Boxes of a page are whole periods of the swizzle: 8 rows.
    const Loader loader = ragged                         ? Loader::kAffine
                          : config.kv.page_size % 8 == 0 ? Loader::kPaged
                                                         : Loader::kGather;
    const auto of_rows = [&](long long rows) {
      const KernelConfig kernel = sm90_config(config.dtype, config.head_dim_qk, config.head_dim_vo,
                                              loader, rows, config.dtype_kv());
      if (config.variant.parts.empty()) return with_even_reads(kernel);
      return transforms_rows(config.variant) ? with_row_transforms(kernel) : kernel;
    };
    if (config.kernel == "sm90a" || any) {
      const KernelConfig kernel = of_rows(max_rows(config));
      const bool wide =
          !fp8 && takes_third_warpgroup(config.variant) && wants_third_warpgroup(config);
      if (invariant) return invariant_sm90(kernel, config, wide);
      if (wide && wants_long_tile(config)) {
        const KernelConfig long_tile = with_tile(kernel, {128, 160, 2});
        if (long_tile.ctas_per_sm > 0) return long_tile;
      }
      return wide ? with_third_warpgroup(kernel, !config.variant.parts.empty()) : kernel;
    }
    const Sm90Tile tile = parse_sm90_tile(config.kernel.substr(5));
    KernelConfig from = of_rows(tile.tile_q);
    if (invariant) {
      check_invariant_tile(config, tile.tile_kv, invariant_tile_kv(config));
      from.num_shapes = 1;
      from.shapes[1] = {};
      from.chunk_keys = config.chunk_keys;
    }
    const KernelConfig kernel = with_tile(from, tile);
    check_sm90_tile(config, kernel);
    return kernel;
  }
  if (is_sm80(config.kernel) || (any && sm80)) {
    const TileQuery query = tile_query(config, arch, copies);
    if (invariant && config.kernel.size() > 5) {
      int tile_q = 0, tile_kv = 0;
      if (std::sscanf(config.kernel.c_str() + 5, "%dx%d", &tile_q, &tile_kv) == 2) {
        check_invariant_tile(config, tile_kv, kInvariantTileKv);
        check(tile_q >= 32, "attention: kernel is '", config.kernel, "', whose warps share ",
              tile_q, " rows; in invariant mode tiles have 32, 64 or 128 rows");
      }
    }
    return config.kernel.size() > 5 ? forced_tile(query, config.kernel.substr(5))
                                    : choose_tiles(query);
  }
  KernelConfig plain = plain_config(config.dtype, config.head_dim_qk, config.head_dim_vo, copies);
  plain.dtype_kv = config.dtype_kv();
  plain.chunk_keys = config.chunk_keys;
  return plain;
}

}  // namespace plait::cuda
