// kernels/sm80 executed on the host, its PTX emulated from the manual (emulate.h, emulated/ptx),
// and compared with float64: every tile, both loaders, masks, functors, levels, splits and their
// merge, head dims that need padding, NaN in every slot that no key owns and in shared memory as it
// starts. Everything runs in two modes: copies that land as late as they may with threads that take
// turns, and copies that land at once with threads that run ahead.
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include <gtest/gtest.h>

#include "cuda/emulated_case.h"
#include "cuda/invariant_case.h"
#include "sm80/attention.cuh"

namespace plait::test {
namespace {

constexpr TileShape shape_of(int tile_q, int key_split) {
  return {tile_q == 1 ? Mma::kScalar : Mma::kMmaSync, tile_q, key_split};
}

template <Dtype kDtype, int kDimQk, int kDimVo, Loader kLoader, int kTileQ, int kTileKv,
          int kStages, int kWarps, int kSplit, int kTileQ2 = 0, int kSplit2 = 0>
inline constexpr KernelConfig kConfigOf{
    .dtype_q = kDtype,
    .dtype_kv = kDtype,
    .dtype_out = kDtype,
    .head_dim_qk = kDimQk,
    .head_dim_vo = kDimVo,
    .loader = kLoader,
    .tile_kv = kTileKv,
    .num_stages = kStages,
    .num_consumer_warpgroups = 0,
    .producer_registers = 0,
    .consumer_registers = 0,
    .ctas_per_sm = 1,
    .num_shapes = kTileQ2 > 0 ? 2 : 1,
    .shapes = {shape_of(kTileQ, kSplit), shape_of(kTileQ2, kSplit2)},
    .num_warps = kWarps};

// P and the result are rounded to 16 bits, logits are not.
template <class T>
constexpr double kTolerance = std::is_same_v<T, Bfloat16> ? 1.0 / 128 : 1.0 / 1024;
constexpr double kLseTolerance = 2e-5;

template <KernelConfig kConfig, class V, class T, class Kv, class Meaning>
int run_and_compare(const Case<T, Kv>& c, const typename V::Params& variant, const Meaning& meaning,
                    int num_ctas, double tolerance = kTolerance<T>,
                    double lse_tolerance = kLseTolerance, EmulatedOutput* output = nullptr) {
  PlanTarget target = target_of(c.shape, kConfig.shapes[0].tile_q, num_ctas);
  target.tile_kv = kConfig.tile_kv;
  target.chunk_keys = kConfig.chunk_keys;
  target.num_shapes = kConfig.num_shapes;
  for (int i = 0; i < kConfig.num_shapes; ++i) {
    target.shapes[i] = {kConfig.shapes[i].tile_q, kConfig.shapes[i].key_split, 0.1f, 0.1f};
  }
  int merged = 0;
  for (const bool early : {false, true}) {
    SCOPED_TRACE(early ? "early copies, last thread first" : "late copies, first thread first");
    emulate::mode.last_first = emulate::mode.early_copies = early;
    merged = run_emulated<V>(
        c, variant, meaning, target, sm80::num_threads(kConfig),
        [](const VariantCall<V>& call) { sm80::attention<kConfig, V>(call); }, tolerance,
        lse_tolerance, output);
  }
  emulate::mode = {};
  return merged;
}

Shape shape(int head_dim_qk, int head_dim_vo, int group_size, bool affine = false) {
  Shape s;
  s.head_dim_qk = head_dim_qk;
  s.head_dim_vo = head_dim_vo;
  s.group_size = group_size;
  s.affine = affine;
  s.num_kv_heads = 2;
  return s;
}

// Requests that leave tiles empty, not full, and full to the last row and key of a tile_q x tile_kv
// tile; a few CTAs, so that rows are split.
template <int kTileQ, int kTileKv, int kStages, int kWarps, int kSplit, Loader kLoader>
void check_tile(unsigned seed) {
  constexpr bool kAffine = kLoader == Loader::kAffine;
  const int group_size = kTileQ == 1 ? 1 : 3;
  const int tokens = std::max(kTileQ / group_size, 1);
  const auto c =
      make_case<Bfloat16>(shape(24, 40, group_size, kAffine), {1, -1, 0}, {1, 0, 2, tokens + 1},
                          {5 * kTileKv + 7, 9, 1, std::max(2 * kTileKv, tokens + 1)}, 0, seed);
  EXPECT_GT(
      (run_and_compare<
          kConfigOf<Dtype::kBfloat16, 24, 40, kLoader, kTileQ, kTileKv, kStages, kWarps, kSplit>,
          Standard>(c, {}, PlainMeaning{}, 5)),
      0)
      << "nothing was split";
}

template <KernelConfig kConfig>
void run_invariant(const Case<Bfloat16>& c, int num_ctas, EmulatedOutput* output) {
  run_and_compare<kConfig, Standard>(c, {}, PlainMeaning{}, num_ctas, kTolerance<Bfloat16>,
                                     kLseTolerance, output);
}
TEST(Sm80Emulated, InvariantBits) {
  constexpr Dtype kDtype = Dtype::kBfloat16;
  expect_invariant<Bfloat16>(
      shape(64, 48, 3),
      run_invariant<with_chunks(kConfigOf<kDtype, 64, 48, Loader::kAffine, 32, 64, 2, 2, 1>)>,
      run_invariant<with_chunks(kConfigOf<kDtype, 64, 48, Loader::kAffine, 128, 64, 1, 4, 1>)>);
}

TEST(Sm80Emulated, Tiles1) {
  check_tile<1, 32, 3, 4, 4, Loader::kGather>(1);
  check_tile<1, 64, 2, 4, 4, Loader::kAffine>(2);
  check_tile<1, 128, 1, 4, 4, Loader::kGather>(3);
}
TEST(Sm80Emulated, Tiles16) {
  check_tile<16, 32, 4, 2, 2, Loader::kGather>(4);
  check_tile<16, 64, 2, 4, 4, Loader::kGather>(5);
  check_tile<16, 128, 1, 4, 4, Loader::kAffine>(6);
}
TEST(Sm80Emulated, Tiles32) {
  check_tile<32, 32, 3, 4, 2, Loader::kAffine>(7);
  check_tile<32, 64, 3, 4, 2, Loader::kGather>(8);
  check_tile<32, 128, 1, 4, 2, Loader::kGather>(9);
}
TEST(Sm80Emulated, Tiles64) {
  check_tile<64, 32, 2, 4, 1, Loader::kGather>(10);
  check_tile<64, 64, 2, 4, 1, Loader::kAffine>(11);
  check_tile<64, 128, 1, 8, 2, Loader::kGather>(12);
}
TEST(Sm80Emulated, Tiles128) {
  check_tile<128, 32, 3, 4, 1, Loader::kGather>(13);
  check_tile<128, 64, 2, 4, 1, Loader::kAffine>(14);
  check_tile<128, 128, 1, 8, 1, Loader::kGather>(15);
}

constexpr KernelConfig kTwoShapes =
    kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kGather, 64, 64, 2, 4, 1, 16, 4>;

TEST(Sm80Emulated, TwoShapesInOneLaunch) {
  const auto c =
      make_case<Bfloat16>(shape(24, 40, 4), {1, -1, 0}, {1, 30, 2, 1}, {900, 100, 70, 64}, 0, 20);
  EXPECT_GT((run_and_compare<kTwoShapes, Standard>(c, {}, PlainMeaning{}, 12)), 0);
}

TEST(Sm80Emulated, WarpsThatFallAsleep) {
  const auto c =
      make_case<Bfloat16>(shape(24, 40, 4), {1, -1, 0}, {1, 30, 2, 1}, {300, 100, 70, 64}, 0, 23);
  for (const unsigned seed : {1u, 2u}) {
    emulate::mode.naps = seed;
    run_and_compare<kTwoShapes, Standard>(c, {}, PlainMeaning{}, 7);
  }
}

TEST(Sm80Emulated, RowsWithoutKeys) {  // more queries than keys: the first see nothing
  const auto c = make_case<Bfloat16>(shape(24, 40, 3), {1, -1, 0}, {9, 2, 3}, {4, 0, 3}, 0, 21);
  run_and_compare<kTwoShapes, Standard>(c, {}, PlainMeaning{}, 2);
}

TEST(Sm80Emulated, WindowWithSinks) {
  const auto c = make_case<Bfloat16>(shape(24, 40, 3), {1, 20, 5}, {3, 30}, {450, 250}, 0, 22);
  run_and_compare<kTwoShapes, Standard>(c, {}, PlainMeaning{}, 5);
}

TEST(Sm80Emulated, WindowNotCausal) {
  const auto c = make_case<Bfloat16>(shape(24, 40, 3), {0, 20, 0}, {3, 30}, {450, 50}, 0, 23);
  run_and_compare<kTwoShapes, Standard>(c, {}, PlainMeaning{}, 5);
}

template <KernelConfig kConfig>
void check_custom_mask(int group_size) {
  auto c =
      make_case<Bfloat16>(shape(24, 40, group_size), {1, -1, 0}, {3, 30, 1}, {450, 250, 40}, 0, 31);
  c.view.request_mask_begin.assign(3, kMaskBegin);
  run_and_compare<kConfig, CustomMask>(c, {}, MaskMeaning{}, 5);
}
TEST(Sm80Emulated, CustomMask) {
  check_custom_mask<kTwoShapes>(3);
  check_custom_mask<kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kGather, 1, 32, 2, 4, 4>>(1);
  check_custom_mask<kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kGather, 32, 128, 1, 4, 2>>(3);
}

// Tiles before the first masked key do not look at bits.
TEST(Sm80Emulated, CustomMaskCostsNothingBeforeItsKeys) {
  const auto check = [](auto run, int tile_kv, bool affine) {
    auto c = make_case<Bfloat16>(shape(24, 40, 3, affine), {1, -1, 0}, {3, 20, 1}, {450, 150, 140},
                                 0, 32);
    c.view.request_mask_begin.assign(3, kMaskBegin);
    MaskMeaning meaning;
    meaning.false_bits_end = kMaskBegin / tile_kv * tile_kv;
    run(c, meaning);
  };
  check([](const auto& c,
           const auto& meaning) { run_and_compare<kTwoShapes, CustomMask>(c, {}, meaning, 5); },
        kTwoShapes.tile_kv, false);
  check(
      [](const auto& c, const auto& meaning) {
        run_and_compare<kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kAffine, 1, 32, 2, 4, 4>,
                        CustomMask>(c, {}, meaning, 5);
      },
      32, true);
}

TEST(Sm80Emulated, ComposedLevelsThroughARowMap) {
  const auto c =
      make_case<Bfloat16>(shape(24, 40, 3), {1, -1, 0}, {1, 4, 20}, {70, 4, 20}, 150, 24);
  EXPECT_GT((run_and_compare<kTwoShapes, Standard>(c, {}, PlainMeaning{}, 4)), 0);
}

TEST(Sm80Emulated, GroupLargerThanTheTile) {  // tiles split a token; both parts are merged apart
  Shape s = shape(24, 40, 21);
  s.num_kv_heads = 1;
  const auto c = make_case<Bfloat16>(s, {1, -1, 0}, {2, 1}, {200, 3}, 0, 25);
  EXPECT_GT((run_and_compare<kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kGather, 16, 32, 2, 2, 2>,
                             Standard>(c, {}, PlainMeaning{}, 9)),
            0);
}

TEST(Sm80Emulated, OneKeyAPage) {
  Shape s = shape(24, 40, 3);
  s.page_size = 1;
  const auto c = make_case<Bfloat16>(s, {1, -1, 0}, {1, 9}, {200, 130}, 0, 26);
  run_and_compare<kTwoShapes, Standard>(c, {}, PlainMeaning{}, 3);
}

// Transforms write what they compute back in 16 bits, which the reference does not.
template <KernelConfig kConfig>
void check_all_functors(int group_size) {
  const auto c =
      make_case<Float16>(shape(24, 40, group_size), {1, -1, 0}, {1, 6, 1}, {200, 40, 0}, 0, 27);
  AllFunctorsMeaning meaning;
  meaning.bias = 0.75;
  for (int h = 0; h < c.num_qo_heads(); ++h) meaning.slopes.push_back(0.01f * (h + 1));
  EXPECT_GT((run_and_compare<kConfig, AllFunctors>(c, {0.75f, meaning.slopes.data()}, meaning, 4,
                                                   1.0 / 200, 1.0 / 400)),
            0);
}
TEST(Sm80Emulated, AllFunctors) {
  check_all_functors<kConfigOf<Dtype::kFloat16, 24, 40, Loader::kGather, 32, 64, 2, 4, 2>>(3);
}
TEST(Sm80Emulated, AllFunctorsOnCudaCores) {
  check_all_functors<kConfigOf<Dtype::kFloat16, 24, 40, Loader::kGather, 1, 32, 2, 4, 4>>(1);
}

template <KernelConfig kConfig>
void check_without_softmax(int group_size) {
  const auto c =
      make_case<Bfloat16>(shape(24, 40, group_size), {1, -1, 0}, {1, 6, 2}, {200, 40, 0}, 0, 28);
  SigmoidMeaning meaning;
  meaning.use_softmax = false;
  meaning.bias = -3;
  EXPECT_GT((run_and_compare<kConfig, Sigmoid>(c, {-3.0f}, meaning, 4)), 0);
}
TEST(Sm80Emulated, WithoutSoftmax) {
  check_without_softmax<kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kGather, 16, 64, 2, 4, 4>>(3);
  check_without_softmax<kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kGather, 1, 64, 2, 4, 4>>(1);
}

// Rows of whole 128 bytes are swizzled, others padded; both kinds, on both sides.
TEST(Sm80Emulated, SwizzledRows) {
  const auto c = make_case<Float16>(shape(64, 128, 2), {1, -1, 0}, {1, 17}, {150, 40}, 0, 29);
  run_and_compare<kConfigOf<Dtype::kFloat16, 64, 128, Loader::kGather, 32, 32, 2, 4, 2>, Standard>(
      c, {}, PlainMeaning{}, 2);
}
TEST(Sm80Emulated, LargestHead) {
  const auto c = make_case<Float16>(shape(256, 248, 1), {1, -1, 0}, {1, 3}, {90, 5}, 0, 30);
  run_and_compare<kConfigOf<Dtype::kFloat16, 256, 248, Loader::kGather, 16, 32, 1, 2, 2>, Standard>(
      c, {}, PlainMeaning{}, 2);
  run_and_compare<kConfigOf<Dtype::kFloat16, 256, 248, Loader::kGather, 1, 32, 1, 4, 4>, Standard>(
      c, {}, PlainMeaning{}, 2);
}

// fp8 K and V: head dims in both layouts and of an odd number of chunks, both loaders, one row on
// CUDA cores, many stages, warps of 16 and of 32 keys, tiles made 16-bit; then with transforms,
// which must see values.
template <KernelConfig kBase, Dtype kDtypeKv>
inline constexpr KernelConfig kFp8Of = [] {
  KernelConfig config = kBase;
  config.dtype_kv = kDtypeKv;
  return config;
}();
template <KernelConfig kBase>
inline constexpr KernelConfig kWideOf = [] {
  KernelConfig config = kBase;
  config.num_wide_tiles = 1;
  return config;
}();
template <class T, class Kv, KernelConfig kConfig>
void check_fp8(int group_size, unsigned seed) {
  auto c = make_case<T, Kv>(shape(kConfig.head_dim_qk, kConfig.head_dim_vo, group_size,
                                  kConfig.loader == Loader::kAffine),
                            {1, -1, 0}, {1, 0, 2, 9}, {5 * kConfig.tile_kv + 7, 9, 1, 70}, 0, seed);
  c.k_scale = 0.75f;
  c.v_scale = 1.5f;
  run_and_compare<kConfig, Standard>(c, {}, PlainMeaning{}, 5);
}
TEST(Sm80Emulated, Fp8) {
  constexpr Dtype kBf16 = Dtype::kBfloat16, kF16 = Dtype::kFloat16;
  check_fp8<Bfloat16, E4m3,
            kFp8Of<kConfigOf<kBf16, 64, 128, Loader::kGather, 16, 64, 2, 4, 4>, Dtype::kE4m3>>(3,
                                                                                               1);
  check_fp8<Float16, E5m2,
            kFp8Of<kConfigOf<kF16, 48, 80, Loader::kAffine, 32, 32, 3, 4, 2>, Dtype::kE5m2>>(3, 2);
  check_fp8<Bfloat16, E5m2,
            kFp8Of<kConfigOf<kBf16, 64, 64, Loader::kGather, 1, 64, 2, 4, 4>, Dtype::kE5m2>>(1, 3);
  check_fp8<
      Float16, E4m3,
      kFp8Of<kConfigOf<kF16, 128, 16, Loader::kGather, 64, 64, 1, 4, 1, 16, 4>, Dtype::kE4m3>>(3,
                                                                                               4);
  check_fp8<
      Bfloat16, E4m3,
      kWideOf<kFp8Of<kConfigOf<kBf16, 32, 48, Loader::kAffine, 16, 32, 2, 2, 2>, Dtype::kE4m3>>>(3,
                                                                                                 8);
}
// Products with fp8 are of float16, which neither Q nor weights without softmax need fit: rows of Q
// near the ends of bfloat16 and without any number, weights of a million.
template <KernelConfig kConfig>
void check_fp8_range(float size) {
  auto c = make_case<Bfloat16, E4m3>(shape(32, 48, 3), {1, -1, 0}, {1, 2}, {150, 5}, 0, 6);
  for (Bfloat16& x : c.q.data) x = from_float<Bfloat16>(to_float(x) * size);
  for (int i = 0; i < 32; ++i) c.q.data[i] = {0};
  c.sm_scale = 0.3f / size;
  run_and_compare<kConfig, Standard>(c, {}, PlainMeaning{}, 2);
}
struct Steep {
  struct Params {};
  static constexpr bool kUseSoftmax = false;
  PLAIT_HD static float logits_transform(const Params&, const LogitContext&, float x) {
    return 1e6f * x * x;
  }
};
struct SteepMeaning : PlainMeaning {
  double logit(double x, int, int, int) const { return 1e6 * x * x; }
};
TEST(Sm80Emulated, Fp8OfEverySize) {
  constexpr KernelConfig kConfig =
      kFp8Of<kConfigOf<Dtype::kBfloat16, 32, 48, Loader::kGather, 16, 128, 1, 4, 4>, Dtype::kE4m3>;
  check_fp8_range<kConfig>(0x1p120f);
  check_fp8_range<kConfig>(0x1p-120f);
  auto c = make_case<Bfloat16, E4m3>(shape(32, 48, 3), {1, -1, 0}, {1, 2}, {150, 5}, 0, 7);
  for (E4m3& x : c.v.data) x.bits &= 0x7f;  // no sum cancels
  SteepMeaning meaning;
  meaning.use_softmax = false;
  run_and_compare<kConfig, Steep>(c, {}, meaning, 2);
}
TEST(Sm80Emulated, Fp8WithTransforms) {
  constexpr KernelConfig kConfig = kWideOf<
      kFp8Of<kConfigOf<Dtype::kFloat16, 32, 48, Loader::kGather, 16, 64, 2, 4, 4>, Dtype::kE4m3>>;
  auto c = make_case<Float16, E4m3>(shape(32, 48, 3), {1, -1, 0}, {1, 6, 1}, {200, 40, 0}, 0, 5);
  c.k_scale = 0.5f;
  c.v_scale = 0.25f;
  AllFunctorsMeaning meaning;
  meaning.bias = 0.75;
  for (int h = 0; h < c.num_qo_heads(); ++h) meaning.slopes.push_back(0.01f * (h + 1));
  run_and_compare<kConfig, AllFunctors>(c, {0.75f, meaning.slopes.data()}, meaning, 4, 1.0 / 200,
                                        1.0 / 400);
}

}  // namespace
}  // namespace plait::test
