// The choice of the sm80 template's tiles, against the limits of every architecture and without a
// GPU: what is chosen fits, runs every row, and follows from bounds in the direction that it
// should.
#include "cuda/tile_choice.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/kernel_choice.h"
#include "cuda/sm90_tiles.h"
#include "cuda/tensor_maps.h"
#include "plait/error.h"
#include "sm80/layout.h"
#include "sm90/smem.h"

namespace plait::cuda {
namespace {

constexpr const char* kArchs[] = {"75", "80", "86", "89", "90a", "100", "120"};

TileQuery query(const std::string& arch, int head_dim_qk, int head_dim_vo, long long rows) {
  return {arch, Dtype::kBfloat16, head_dim_qk, head_dim_vo, Loader::kGather, rows, rows};
}

TEST(TileChoice, StepOneIsTheSmallestTileThatHoldsTheAverage) {
  const long long average[] = {1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 100000};
  const int wanted[] = {16, 16, 16, 32, 32, 64, 64, 128, 128, 128, 128};
  for (int i = 0; i < 11; ++i)
    EXPECT_EQ(choose_tile_q(average[i], 100000), wanted[i]) << average[i];
  EXPECT_EQ(choose_tile_q(1, 1), 1);  // CUDA cores only where no row block can have more
}

TEST(TileChoice, InvariantModeHasOneTileOfKeysAndSplitsNone) {
  for (const char* arch : {"80", "86", "90a", "120"}) {
    for (const int head_dim : {64, 128, 192, 256}) {
      for (const bool fp8 : {false, true}) {
        int tile_kv = 0;
        for (const int q_len : {1, 5, 16, 4096}) {
          AttentionConfig config;
          config.num_qo_heads = 32;
          config.num_kv_heads = 8;
          config.head_dim_qk = config.head_dim_vo = head_dim;
          if (fp8) config.kv_dtype = Dtype::kE4m3;
          config.kv.kind = KvFormat::kPaged;
          config.kv.page_size = 16;
          config.bounds = {
              .requests = 8, .query_tokens = 8 * q_len, .keys = 4096, .max_q_len = q_len};
          config.device = {kCuda, 0};
          config.chunk_keys = 512;
          const KernelConfig kernel = choose_kernel(config, arch);
          SCOPED_TRACE(concat("sm_", arch, " d ", head_dim, " q_len ", q_len, fp8 ? " fp8" : ""));
          EXPECT_EQ(kernel.chunk_keys, 512);
          EXPECT_EQ(512 % kernel.tile_kv, 0);
          if (tile_kv == 0) tile_kv = kernel.tile_kv;
          EXPECT_EQ(kernel.tile_kv, tile_kv);
          EXPECT_EQ(template_of(kernel),
                    std::string(arch) == "90a" ? Template::kSm90 : Template::kSm80);
          for (int i = 0; i < kernel.num_shapes; ++i) EXPECT_EQ(kernel.shapes[i].key_split, 1);
        }
      }
    }
  }
}

TEST(TileChoice, LimitsOfLaterArchitectures) {
  EXPECT_EQ(limits_of("90a").arch, 90);
  EXPECT_EQ(limits_of("103").arch, 100);
  EXPECT_EQ(limits_of("121").arch, 120);
  EXPECT_EQ(limits_of("150").arch, 120);
}

// Every candidate within registers, shared memory and threads, with a multiple of 16 keys and rows
// a warp, and all CTAs that the kernel is compiled for.
TEST(TileChoice, CandidatesFit) {
  int checked = 0;
  for (const char* arch : kArchs) {
    const ArchLimits limits = limits_of(arch);
    for (const int dim : {8, 40, 64, 96, 128, 192, 256}) {
      for (const int tile_q : {1, 16, 32, 64, 128}) {
        for (const TileCandidate& candidate :
             tile_candidates(query(arch, dim, dim, tile_q), tile_q)) {
          const KernelConfig& c = candidate.config;
          const int threads = sm80::num_threads(c);
          EXPECT_EQ(template_of(c), Template::kSm80);
          EXPECT_EQ(c.ctas_per_sm, candidate.ctas_per_sm);
          EXPECT_LE(sm80_smem_bytes(c), limits.smem_cta_bytes);
          EXPECT_LE(c.ctas_per_sm * (sm80_smem_bytes(c) + 1024), limits.smem_bytes);
          EXPECT_LE(c.ctas_per_sm * threads, limits.max_threads);
          EXPECT_LE(candidate.registers, 255);
          EXPECT_LE(c.ctas_per_sm * threads * candidate.registers, kRegistersOfSm);
          EXPECT_GE(threads, c.tile_kv);
          EXPECT_GT(candidate.score, 0);
          EXPECT_EQ(c.shapes[0].tile_q, tile_q);
          if (c.num_shapes == 2) EXPECT_LT(c.shapes[1].tile_q, tile_q);
          for (int i = 0; i < c.num_shapes; ++i) {
            const TileShape& shape = c.shapes[i];
            ASSERT_EQ(c.num_warps % shape.key_split, 0);
            ASSERT_EQ(c.tile_kv % shape.key_split, 0);
            if (shape.tile_q == 1) {
              EXPECT_EQ(shape.mma, Mma::kScalar);
              EXPECT_EQ(shape.key_split, c.num_warps);
            } else {
              EXPECT_EQ(shape.mma, Mma::kMmaSync);
              EXPECT_EQ(c.tile_kv / shape.key_split % 16, 0);
              EXPECT_EQ(shape.tile_q * shape.key_split % (16 * c.num_warps), 0);
              EXPECT_LE(shape.tile_q * shape.key_split, 32 * c.num_warps);
            }
          }
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 1000);
}

TEST(TileChoice, TakesTheBestScore) {
  for (const char* arch : kArchs) {
    for (const int dim : {64, 128, 256}) {
      for (const int rows : {1, 16, 128}) {
        const KernelConfig chosen = choose_tiles(query(arch, dim, dim, rows));
        float best = 1e30f, of_chosen = 1e30f;
        for (const TileCandidate& c :
             tile_candidates(query(arch, dim, dim, rows), chosen.shapes[0].tile_q)) {
          best = std::min(best, c.score);
          if (c.config.tile_kv == chosen.tile_kv && c.config.num_stages == chosen.num_stages &&
              c.config.num_warps == chosen.num_warps && c.config.num_shapes == chosen.num_shapes) {
            of_chosen = std::min(of_chosen, c.score);
          }
        }
        EXPECT_EQ(best, of_chosen) << arch << " " << dim << " " << rows;
      }
    }
  }
}

// Every head dim has a tile on every architecture, no larger than step 1 wants it.
TEST(TileChoice, EveryHeadDimHasATile) {
  for (const char* arch : kArchs) {
    for (int dim_qk = 8; dim_qk <= 256; dim_qk += 8) {
      for (const int dim_vo : {8, dim_qk, 256}) {
        for (const int rows : {1, 16, 32, 64, 128}) {
          const KernelConfig c = choose_tiles(query(arch, dim_qk, dim_vo, rows));
          EXPECT_LE(c.shapes[0].tile_q, rows);
          EXPECT_GE(c.ctas_per_sm, 1);
        }
      }
    }
  }
}

// head_dim 128 on an H200: what the kernel was made for. Prefill keeps 2 CTAs of 128 rows, 32 a
// warp, with a shape for the decodes beside it; decode has 128 KiB in its rings.
TEST(TileChoice, OfAnH200) {
  const KernelConfig prefill = choose_tiles(query("90a", 128, 128, 16384));
  EXPECT_EQ(prefill.shapes[0].tile_q, 128);
  EXPECT_EQ(prefill.num_warps, 4);
  EXPECT_EQ(prefill.ctas_per_sm, 2);
  ASSERT_EQ(prefill.num_shapes, 2);
  EXPECT_EQ(prefill.shapes[1].tile_q, 16);
  const KernelConfig decode = choose_tiles(query("90a", 128, 128, 4));
  EXPECT_EQ(decode.shapes[0].tile_q, 16);
  EXPECT_EQ(decode.num_shapes, 1);
  EXPECT_EQ(decode.ctas_per_sm * decode.num_stages * decode.tile_kv * 512, 128 * 1024);
  EXPECT_EQ(decode.ctas_per_sm, 4);
}

std::string error_of(const std::string& text, const char* arch = "90a", int head_dim = 128) {
  try {
    forced_tile(query(arch, head_dim, head_dim, 1), text);
  } catch (const ArgumentError& error) {
    return error.what();
  }
  return "";
}

TEST(TileChoice, ForcedTiles) {
  for (const int tile_q : {1, 16, 32, 64, 128}) {
    for (const int tile_kv : {32, 64, 128}) {
      const std::string text = std::to_string(tile_q) + "x" + std::to_string(tile_kv) + "x1";
      const KernelConfig c = forced_tile(query("90a", 128, 128, 1), text);
      EXPECT_EQ(c.num_shapes, 1);
      EXPECT_EQ(c.shapes[0].tile_q, tile_q);
      EXPECT_EQ(c.tile_kv, tile_kv);
      EXPECT_EQ(c.num_stages, 1);
    }
  }
  for (const char* text : {"", "128", "128x64", "128x64x", "128x64x2x", "128x64x5", "128x64x0",
                           "48x64x2", "128x48x2", "128 x64x2 "}) {
    EXPECT_NE(error_of(text).find("attention: kernel is 'sm80 " + std::string(text) +
                                  "'; a tile is written tile_q x tile_kv x stages"),
              std::string::npos)
        << text << ": " << error_of(text);
  }
  EXPECT_NE(
      error_of("128x128x4", "86", 256).find("needs more registers or shared memory than sm_86"),
      std::string::npos);
}

// ---- What an Attention gets. ----

AttentionConfig attention(const std::string& kernel = "auto") {
  AttentionConfig c;
  c.num_qo_heads = 32;
  c.num_kv_heads = 8;
  c.head_dim_qk = c.head_dim_vo = 128;
  c.kv = paged_kv(16);
  c.device = {kCuda, 0};
  c.bounds = {.requests = 64, .query_tokens = 64, .keys = 4096, .max_q_len = 1};
  c.kernel = kernel;
  return c;
}

TEST(KernelChoice, AutoByArchitecture) {
  AttentionConfig c = attention();
  EXPECT_EQ(template_of(choose_kernel(c, "75")), Template::kPlain);
  for (const char* arch : {"80", "86", "87", "89", "100", "103", "120", "121"}) {
    EXPECT_EQ(template_of(choose_kernel(c, arch)), Template::kSm80) << arch;
  }
  EXPECT_EQ(template_of(choose_kernel(c, "90a")), Template::kSm90);
  c.head_dim_qk = c.head_dim_vo = 40;
  EXPECT_EQ(template_of(choose_kernel(c, "90a")), Template::kSm90);
  c.dtype = Dtype::kFloat32;
  EXPECT_EQ(template_of(choose_kernel(c, "90a")), Template::kPlain);
  EXPECT_EQ(template_of(choose_kernel(attention("sm80"), "90a")), Template::kSm80);
  EXPECT_EQ(template_of(choose_kernel(attention("plain"), "80")), Template::kPlain);
}

TEST(KernelChoice, Sm90LoaderByFormat) {
  AttentionConfig c = attention();
  c.kv = ragged_kv();
  EXPECT_EQ(choose_kernel(c, "90a").loader, Loader::kAffine);
  for (const int page_size : {8, 16, 24, 48, 64, 256}) {
    c.kv = paged_kv(page_size);
    const KernelConfig config = choose_kernel(c, "90a");
    EXPECT_EQ(config.loader, Loader::kPaged) << page_size;
    const int rows = box_rows_of(page_size, config.tile_kv);
    EXPECT_TRUE(rows % 8 == 0 && page_size % rows == 0 && config.tile_kv % rows == 0) << page_size;
  }
  for (const int page_size : {1, 3, 12, 17}) {
    c.kv = paged_kv(page_size);
    EXPECT_EQ(choose_kernel(c, "90a").loader, Loader::kGather) << page_size;
  }
}

// Two CTAs a multiprocessor, each with 64 KiB of K and V under way, or two tiles where those are
// larger.
TEST(KernelChoice, Sm90DecodeKeepsSoMuchUnderWay) {
  for (const int dim : {64, 96, 128, 192}) {
    for (const int max_rows : {16, 32, 64}) {
      const KernelConfig c =
          with_even_reads(sm90_config(Dtype::kBfloat16, dim, dim, Loader::kPaged, max_rows));
      const int tile = c.tile_kv * ((dim + 63) / 64) * 128 * 2;  // K and V
      EXPECT_EQ(c.ctas_per_sm, 2) << dim;
      EXPECT_EQ(c.num_q_stages, 2) << dim;
      EXPECT_EQ(c.num_stages, std::clamp(64 * 1024 / tile, 2, 4)) << dim << " " << max_rows;
    }
  }
}

// What consumers do beside the softmax takes more of it to hide.
TEST(KernelChoice, Sm90DecodeKeepsMoreUnderWayForFunctors) {
  AttentionConfig c = attention();
  c.variant = causal();
  EXPECT_EQ(choose_kernel(c, "90a").num_stages, 2);
  for (const Variant& variant : {rope(), soft_cap(30.0f), custom_mask()}) {
    c.variant = variant;
    EXPECT_EQ(choose_kernel(c, "90a").num_stages, 3) << variant.name();
  }
}

// A level collects the queries of many requests, in tiles of 64 rows where each has few; in those
// of prefill where one has many.
TEST(KernelChoice, ComposedFormats) {
  AttentionConfig c = attention();
  c.kv = composed_kv(paged_kv(16), 2);
  const KernelConfig decode = choose_kernel(c, "90a");
  EXPECT_EQ(decode.num_shapes, 1);
  EXPECT_EQ(decode.shapes[0].tile_q, 64);
  EXPECT_EQ(decode.ctas_per_sm, 2);
  c.bounds.requests = c.bounds.query_tokens = 4;
  EXPECT_EQ(choose_kernel(c, "90a").shapes[0].tile_q, 16);  // 4 queries of 4 heads
  c.bounds.query_tokens = c.bounds.max_q_len = 64;
  EXPECT_GE(choose_kernel(c, "90a").shapes[0].tile_q, 128);
}

TEST(KernelChoice, Sm90FitsAMultiprocessorWithEveryHeadDim) {
  for (const int max_rows : {16, 32, 64, 65}) {
    for (int qk = 8; qk <= 256; qk += 8) {
      for (int vo = 8; vo <= 256; vo += 8) {
        const KernelConfig c = sm90_config(Dtype::kBfloat16, qk, vo, Loader::kPaged, max_rows);
        EXPECT_GE(c.num_stages, 2) << qk << " " << vo;
        EXPECT_LE(c.ctas_per_sm * (sm90_smem_bytes(c) + 1024), 228 * 1024) << qk << " " << vo;
      }
    }
  }
}

// Head dims that are no multiple of 16 have rows that no copy of 16 bytes ends with.
TEST(KernelChoice, Fp8) {
  AttentionConfig c = attention();
  c.kv_dtype = Dtype::kE5m2;
  EXPECT_EQ(template_of(choose_kernel(c, "75")), Template::kPlain);
  EXPECT_EQ(template_of(choose_kernel(c, "80")), Template::kSm80);
  for (const char* arch : {"75", "80", "90a"}) {
    EXPECT_EQ(choose_kernel(c, arch).dtype_kv, Dtype::kE5m2);
    EXPECT_EQ(choose_kernel(c, arch).dtype_q, Dtype::kBfloat16);
    EXPECT_EQ(choose_kernel(c, arch).num_wide_tiles, 0);
  }
  // On sm_90a few rows take it from registers, unless a transform rewrites rows.
  const auto on_sm90 = [&c] { return template_of(choose_kernel(c, "90a")); };
  EXPECT_EQ(on_sm90(), Template::kSm80);
  c.bounds.max_q_len = 4;
  EXPECT_EQ(on_sm90(), Template::kSm80);
  c.bounds.max_q_len = 5;  // 20 rows
  EXPECT_EQ(on_sm90(), Template::kSm90);
  c.bounds.max_q_len = 1;
  c.kernel = "sm90a";
  EXPECT_EQ(on_sm90(), Template::kSm90);
  c.kernel = "auto";
  c.variant = rope();
  EXPECT_EQ(on_sm90(), Template::kSm90);
  EXPECT_EQ(choose_kernel(c, "80").num_wide_tiles, 1);
  c.variant = full();
  // Before there was an instruction for e4m3, warps of many rows shared one conversion.
  c.bounds = {.requests = 4, .query_tokens = 4096, .keys = 4096};
  EXPECT_EQ(choose_kernel(c, "80").num_wide_tiles, 0);
  c.kv_dtype = Dtype::kE4m3;
  EXPECT_EQ(choose_kernel(c, "80").num_wide_tiles, 1);
  EXPECT_EQ(choose_kernel(c, "100").num_wide_tiles, 0);
  c.kv_dtype = Dtype::kE5m2;
  c.head_dim_vo = 40;
  for (const char* arch : {"75", "80", "90a"}) {
    EXPECT_EQ(template_of(choose_kernel(c, arch)), Template::kPlain);
  }
  for (const char* kernel : {"sm80", "sm90a"}) {
    c.kernel = kernel;
    try {
      choose_kernel(c, "90a");
      ADD_FAILURE() << kernel;
    } catch (const ArgumentError& e) {
      EXPECT_EQ(e.what(),
                std::string("kernel '") + kernel +
                    "' takes float8_e5m2 in head dims of multiples of 16, not 128 and 40; "
                    "'auto' and 'plain' run it");
    }
  }
  for (const int max_rows : {16, 32, 64, 65}) {
    for (int qk = 16; qk <= 256; qk += 16) {
      for (int vo = 16; vo <= 256; vo += 16) {
        const KernelConfig config =
            sm90_config(Dtype::kBfloat16, qk, vo, Loader::kPaged, max_rows, Dtype::kE4m3);
        EXPECT_GE(config.num_landing_stages, 2) << qk << " " << vo;
        EXPECT_LE(config.ctas_per_sm * (sm90_smem_bytes(config) + 1024), 228 * 1024)
            << qk << " " << vo;
      }
    }
  }
}

TEST(KernelChoice, ShapesFollowTheBounds) {
  AttentionConfig c = attention("sm80");
  EXPECT_EQ(choose_kernel(c, "80").shapes[0].tile_q, 16);
  c.num_kv_heads = 32;  // each query head has its KV head to itself
  EXPECT_EQ(choose_kernel(c, "80").shapes[0].tile_q, 1);
  c.bounds.max_q_len = 2;
  EXPECT_EQ(choose_kernel(c, "80").shapes[0].tile_q, 16);
  c.bounds = {.requests = 4, .query_tokens = 4096, .keys = 4096};
  EXPECT_EQ(choose_kernel(c, "80").shapes[0].tile_q, 128);
  c.bounds = {.requests = 256, .query_tokens = 256, .keys = 4096, .max_q_len = 1};
  c.num_kv_heads = 8;
  c.kv.num_levels = 2;  // a level's row block may hold all tokens, in tiles of few rows
  EXPECT_EQ(choose_kernel(c, "80").shapes[0].tile_q, 64);
  c.bounds.max_q_len = 17;
  EXPECT_EQ(choose_kernel(c, "80").shapes[0].tile_q, 128);
}

TEST(KernelChoice, RefusedByName) {
  const auto error = [](const AttentionConfig& c, const char* arch) -> std::string {
    try {
      choose_kernel(c, arch);
    } catch (const ArgumentError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_NE(error(attention("sm80"), "75").find("'sm80' needs a GPU of compute capability 8.0"),
            std::string::npos);
  AttentionConfig c = attention("sm80");
  c.dtype = Dtype::kFloat32;
  EXPECT_NE(error(c, "80").find("'sm80' takes bfloat16 and float16, not float32"),
            std::string::npos);
  EXPECT_NE(error(attention("sm90a"), "80").find("'sm90a' needs"), std::string::npos);
  EXPECT_NE(error(attention("sm90 128x128x2"), "100").find("'sm90a' needs"), std::string::npos);
  const auto says = [&](const std::string& kernel, const char* text, int head_dim = 128) {
    AttentionConfig c = attention(kernel.c_str());
    c.head_dim_qk = c.head_dim_vo = head_dim;
    EXPECT_NE(error(c, "90a").find(text), std::string::npos) << kernel << ": " << error(c, "90a");
  };
  for (const char* bad : {"", "128", "128x128", "128x128x", "128x128x2 ", "96x128x2", "128x100x2",
                          "128x0x2", "128x272x2", "128x128x1", "128x128x9", "-128x128x2"}) {
    says(std::string("sm90 ") + bad, "a tile is written tile_q x tile_kv x stages");
  }
  says("sm90 128x128x4", " bytes of shared memory and 160 of 224 registers");
  says("sm90 128x192x2", "208 of 224 registers", 64 + 64);
  c = attention("sm90 128x144x2");
  c.variant = causal() | custom_mask();
  EXPECT_NE(error(c, "90a").find("mask bits of at most 128 keys"), std::string::npos);
}

// A tile by name is what the kernel is compiled for, whatever the bounds.
TEST(KernelChoice, Sm90TilesByName) {
  const KernelConfig large = choose_kernel(attention("sm90 128x144x2"), "90a");
  EXPECT_EQ(to_string(tile_of(large)), "128x144x2");
  EXPECT_EQ(large.num_consumer_warpgroups, 2);
  ASSERT_EQ(large.num_shapes, 2);
  EXPECT_EQ(large.shapes[1].key_split, 2);
  const KernelConfig small = choose_kernel(attention("sm90 64x80x2"), "90a");
  EXPECT_EQ(to_string(tile_of(small)), "64x80x2");
  EXPECT_EQ(small.num_consumer_warpgroups, 1);
  EXPECT_EQ(small.ctas_per_sm, 2);
  EXPECT_EQ(choose_kernel(attention("sm90 64x80x4"), "90a").ctas_per_sm, 1);  // does not fit twice
  EXPECT_EQ(choose_kernel(attention("sm90 32x64x2"), "90a").shapes[0].tile_q, 32);
  // Too large for two buffers of Q, so without the shape that needs them.
  const KernelConfig largest = choose_kernel(attention("sm90 128x176x2"), "90a");
  EXPECT_EQ(largest.num_q_stages, 1);
  EXPECT_EQ(largest.num_shapes, 1);
  EXPECT_EQ(large.num_q_stages, 2);
  const KernelConfig three = choose_kernel(attention("sm90 192x80x2"), "90a");
  EXPECT_EQ(three.num_consumer_warpgroups, 3);
  EXPECT_EQ(to_string(tile_of(three)), "192x80x2");
  EXPECT_EQ(three.shapes[1].key_split, 2);
  EXPECT_EQ(choose_kernel(attention("sm90 192x80x3"), "90a").shapes[1].key_split, 3);
  EXPECT_EQ(choose_kernel(attention("sm90 128x64x3"), "90a").num_shapes, 1);
  AttentionConfig rope_too = attention("sm90 128x96x2");
  rope_too.variant = rope();
  EXPECT_EQ(choose_kernel(rope_too, "90a").producer_registers, 104);
  rope_too.kernel = "sm90 192x64x4";
  EXPECT_EQ(choose_kernel(rope_too, "90a").producer_registers, 80);
  EXPECT_EQ(choose_kernel(rope_too, "90a").consumer_registers, 144);
}

// Three warpgroups for many rows that fill them, where no functor needs the registers.
TEST(KernelChoice, Sm90ThirdWarpgroup) {
  const auto chosen = [](auto&& change) {
    AttentionConfig config = attention("auto");
    config.bounds.max_q_len = config.bounds.query_tokens = 2048;
    config.variant = causal();
    change(config);
    return to_string(tile_of(choose_kernel(config, "90a")));
  };
  EXPECT_EQ(chosen([](AttentionConfig&) {}), "192x80x3");
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.variant = full(); }), "192x80x3");
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.head_dim_qk = c.head_dim_vo = 64; }), "192x112x6");
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.bounds.requests = 1; }), "128x128x2");  // few tiles
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.variant = soft_cap(30.0f); }), "192x80x2");
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.variant = rope(); }), "192x64x3");
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.variant = rms_norm_k(); }), "128x128x2");
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.head_dim_qk = 192; }), "128x96x2");
  EXPECT_EQ(chosen([](AttentionConfig& c) { c.num_qo_heads = 128 * c.num_kv_heads; }), "128x128x2");
}

// Every tile of the table fits, with the registers that a CTA is given; what is chosen is in it.
TEST(KernelChoice, Sm90TilesFit) {
  for (const auto& [qk, vo] : {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}, {8, 40}}) {
    for (const int tile_q : {16, 32, 64, 128, 192}) {
      KernelConfig chosen = sm90_config(Dtype::kBfloat16, qk, vo, Loader::kPaged, tile_q);
      const std::vector<KernelConfig> tiles = sm90_tiles(chosen, tile_q);
      if (tile_q > 128) chosen = with_third_warpgroup(chosen, false);
      const bool listed = std::any_of(tiles.begin(), tiles.end(), [&](const KernelConfig& c) {
        return to_string(tile_of(c)) == to_string(tile_of(chosen)) &&
               c.ctas_per_sm == chosen.ctas_per_sm;
      });
      EXPECT_EQ(listed, tile_q <= 128 || std::max(qk, vo) <= 128) << qk << " " << vo;
      for (const KernelConfig& c : tiles) {
        EXPECT_LE(c.ctas_per_sm * (sm90_smem_bytes(c) + 1024), 228 * 1024);
        const int warpgroups = c.num_consumer_warpgroups + 1;
        const int registers = 65536 / (128 * warpgroups * c.ctas_per_sm) / 8 * 8;
        EXPECT_LE(c.producer_registers + c.num_consumer_warpgroups * c.consumer_registers,
                  warpgroups * registers);
        EXPECT_LT(fragment_registers(c), c.consumer_registers);
      }
    }
  }
}

// Eight rows at one chunk, which ldmatrix reads at a time, lie in eight groups of banks; chunks do
// not overlap and stay within the tile.
void check_chunks(Dtype dtype, int step) {
  for (int dim = step; dim <= 256; dim += step) {
    constexpr int kRows = 32;
    std::vector<bool> used(kRows * sm80::row_bytes(dim, dtype) / 16);
    for (int row = 0; row < kRows; ++row) {
      for (int chunk = 0; chunk < sm80::num_chunks(dim, dtype); ++chunk) {
        const int offset = sm80::chunk_offset(dim, row, chunk, dtype);
        ASSERT_EQ(offset % 16, 0);
        ASSERT_LT(offset / 16, static_cast<int>(used.size()));
        ASSERT_FALSE(used[offset / 16]);
        used[offset / 16] = true;
      }
    }
    for (int first = 0; first < kRows; first += 8) {
      for (int chunk = 0; chunk < sm80::num_chunks(dim, dtype); ++chunk) {
        unsigned groups = 0;
        for (int row = first; row < first + 8; ++row) {
          groups |= 1u << sm80::chunk_offset(dim, row, chunk, dtype) / 16 % 8;
        }
        ASSERT_EQ(groups, 0xffu) << "head_dim " << dim << " chunk " << chunk;
      }
    }
  }
}
TEST(Sm80Layout, ChunksAreApart) {
  check_chunks(Dtype::kFloat16, 8);
  check_chunks(Dtype::kE4m3, 16);
}

}  // namespace
}  // namespace plait::cuda
