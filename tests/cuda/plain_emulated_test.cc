// kernels/plain.cuh and its in-launch merge, executed on the host (emulate.h) and compared with
// float64: formats, levels, row maps, functors, dtypes, odd sizes, NaN in every slot that no key
// owns, CTAs in shuffled order.
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include <gtest/gtest.h>

#include "cuda/emulated_case.h"
#include "cuda/invariant_case.h"
#include "host_device/variant.h"
#include "plain.cuh"

namespace plait::test {
namespace {

template <Dtype kDtype, int kDimQk, int kDimVo, Loader kLoader, int kTileQ>
inline constexpr KernelConfig kConfigOf{.dtype_q = kDtype,
                                        .dtype_kv = kDtype,
                                        .dtype_out = kDtype,
                                        .head_dim_qk = kDimQk,
                                        .head_dim_vo = kDimVo,
                                        .loader = kLoader,
                                        .tile_kv = 64,
                                        .num_stages = 0,
                                        .num_q_stages = 0,
                                        .num_consumer_warpgroups = 0,
                                        .producer_registers = 0,
                                        .consumer_registers = 0,
                                        .ctas_per_sm = 1,
                                        .num_shapes = 1,
                                        .shapes = {{Mma::kScalar, kTileQ, 1}}};

template <KernelConfig kConfig, class V, class T, class Kv, class Meaning>
int run_and_compare(const Case<T, Kv>& c, const typename V::Params& variant, const Meaning& meaning,
                    int num_ctas, double tolerance) {
  return run_emulated<V>(
      c, variant, meaning, target_of(c.shape, kConfig.shapes[0].tile_q, num_ctas),
      plain::kNumThreads, [](const VariantCall<V>& call) { plain::attention<kConfig, V>(call); },
      tolerance, tolerance);
}

constexpr double kFloatTolerance = 2e-5;

TEST(PlainEmulated, InvariantBits) {
  static constexpr KernelConfig kConfig =
      with_chunks(kConfigOf<Dtype::kFloat32, 24, 40, Loader::kAffine, 16>);
  expect_invariant<float>({}, [](const Case<float>& c, int num_ctas, EmulatedOutput* output) {
    PlanTarget target = target_of(c.shape, kConfig.shapes[0].tile_q, num_ctas);
    target.chunk_keys = kTestChunk;
    run_emulated<Standard>(
        c, {}, PlainMeaning{}, target, plain::kNumThreads,
        [](const VariantCall<Standard>& call) { plain::attention<kConfig, Standard>(call); },
        kFloatTolerance, kFloatTolerance, output);
  });
}

TEST(PlainEmulated, FloatPagedFull) {
  const auto c = make_case<float>({}, {}, {1, 5, 0, 2}, {67, 5, 9, 1}, 0, 1);
  run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, Standard>(
      c, {}, PlainMeaning{}, 3, kFloatTolerance);
}

TEST(PlainEmulated, FloatAffineCausalSplit) {
  Shape shape;
  shape.affine = true;
  const auto c = make_case<float>(shape, {1, -1, 0}, {1, 7}, {300, 200}, 0, 2);
  EXPECT_GT((run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kAffine, 16>, Standard>(
                c, {}, PlainMeaning{}, 7, kFloatTolerance)),
            0)
      << "nothing was split";
}

TEST(PlainEmulated, MorePartsThanLanes) {  // a head is merged from 32 and a few more
  const auto c = make_case<float>({}, {1, -1, 0}, {1, 2}, {64 * 37 - 5, 1}, 0, 12);
  EXPECT_GT((run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, Standard>(
                c, {}, PlainMeaning{}, 74, kFloatTolerance)),
            2 * 32);
}

// Parts before, at and behind what a round of the merge takes, of rows of each length.
template <int kDimVo>
void check_many_parts(int num_parts) {
  SCOPED_TRACE(num_parts);
  constexpr KernelConfig kConfig = kConfigOf<Dtype::kFloat32, 8, kDimVo, Loader::kAffine, 4>;
  Shape shape;
  shape.affine = true;
  shape.head_dim_qk = 8;
  shape.head_dim_vo = kDimVo;
  const auto c = make_case<float>(shape, {}, {1}, {64 * num_parts - 3}, 0, num_parts);
  const int num_ctas = num_parts * shape.num_kv_heads;
  const int sources = run_and_compare<kConfig, Standard>(c, {}, PlainMeaning{}, num_ctas, 1e-4);
  EXPECT_EQ(sources, num_parts == 1 ? 0 : num_ctas);
}
TEST(PlainEmulated, ManyParts) {
  for (const int parts : {1, 2, 32, 33, 65}) check_many_parts<8>(parts);
  for (const int parts : {12, 13, 33}) check_many_parts<128>(parts);
  check_many_parts<136>(9);
  check_many_parts<200>(7);
}

TEST(PlainEmulated, RowsWithoutKeys) {  // more queries than keys: the first see nothing
  const auto c = make_case<float>({}, {1, -1, 0}, {9, 2, 3}, {4, 0, 3}, 0, 3);
  run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, Standard>(
      c, {}, PlainMeaning{}, 2, kFloatTolerance);
}

TEST(PlainEmulated, WindowWithSinks) {
  const auto c = make_case<float>({}, {1, 20, 5}, {3, 30}, {250, 150}, 0, 4);
  run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, Standard>(
      c, {}, PlainMeaning{}, 5, kFloatTolerance);
}

TEST(PlainEmulated, CustomMask) {
  auto c = make_case<float>({}, {1, -1, 0}, {3, 30, 1}, {450, 250, 40}, 0, 11);
  c.view.request_mask_begin.assign(3, kMaskBegin);
  run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, CustomMask>(
      c, {}, MaskMeaning{}, 5, kFloatTolerance);
}

TEST(PlainEmulated, ComposedLevelsThroughARowMap) {
  const auto c = make_case<float>({}, {1, -1, 0}, {1, 4, 2}, {70, 4, 2}, 150, 5);
  EXPECT_GT((run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, Standard>(
                c, {}, PlainMeaning{}, 4, kFloatTolerance)),
            0);
}

TEST(PlainEmulated, GroupLargerThanTheTile) {  // tiles split a token; both parts are merged apart
  Shape shape;
  shape.group_size = 21;
  shape.num_kv_heads = 1;
  const auto c = make_case<float>(shape, {1, -1, 0}, {2, 1}, {200, 3}, 0, 6);
  EXPECT_GT((run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 8>, Standard>(
                c, {}, PlainMeaning{}, 9, kFloatTolerance)),
            0);
}

TEST(PlainEmulated, AllFunctors) {
  const auto c = make_case<float>({}, {1, -1, 0}, {1, 6, 1}, {200, 40, 0}, 0, 7);
  AllFunctorsMeaning meaning;
  meaning.bias = 0.75;
  for (int h = 0; h < c.num_qo_heads(); ++h) meaning.slopes.push_back(0.01f * (h + 1));
  EXPECT_GT((run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, AllFunctors>(
                c, {0.75f, meaning.slopes.data()}, meaning, 4, 5e-5)),
            0);
}

TEST(PlainEmulated, WithoutSoftmax) {
  const auto c = make_case<float>({}, {1, -1, 0}, {1, 6, 2}, {200, 40, 0}, 0, 8);
  SigmoidMeaning meaning;
  meaning.use_softmax = false;
  meaning.bias = -3;
  EXPECT_GT((run_and_compare<kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>, Sigmoid>(
                c, {-3.0f}, meaning, 4, 5e-5)),
            0);
}

// Storage of 16 bits: inputs are exact in both, so only the output's rounding is added.
TEST(PlainEmulated, Bfloat16) {
  const auto c = make_case<Bfloat16>({}, {1, -1, 0}, {1, 3}, {200, 40}, 0, 9);
  run_and_compare<kConfigOf<Dtype::kBfloat16, 24, 40, Loader::kGather, 16>, Standard>(
      c, {}, PlainMeaning{}, 4, 1.0 / 256);
}
TEST(PlainEmulated, Float16LargestHead) {
  Shape shape;
  shape.head_dim_qk = 256;
  shape.head_dim_vo = 248;
  shape.group_size = 1;
  const auto c = make_case<Float16>(shape, {1, -1, 0}, {1, 3}, {90, 5}, 0, 10);
  run_and_compare<kConfigOf<Dtype::kFloat16, 256, 248, Loader::kGather, 8>, Standard>(
      c, {}, PlainMeaning{}, 2, 1.0 / 2048);
}

// Numbers of 8 bits times scales; a transform must see the values.
template <Dtype kDtypeKv>
inline constexpr KernelConfig kFp8ConfigOf = [] {
  KernelConfig config = kConfigOf<Dtype::kFloat32, 24, 40, Loader::kGather, 16>;
  config.dtype_kv = kDtypeKv;
  return config;
}();
template <class Kv, Dtype kDtypeKv>
void check_fp8(unsigned seed) {
  auto c = make_case<float, Kv>({}, {1, -1, 0}, {1, 6, 1}, {200, 40, 0}, 0, seed);
  c.k_scale = 1.75f;
  c.v_scale = 0.375f;
  EXPECT_GT((run_and_compare<kFp8ConfigOf<kDtypeKv>, Standard>(c, {}, PlainMeaning{}, 4,
                                                               kFloatTolerance)),
            0);
  AllFunctorsMeaning meaning;
  meaning.bias = 0.75;
  for (int h = 0; h < c.num_qo_heads(); ++h) meaning.slopes.push_back(0.01f * (h + 1));
  run_and_compare<kFp8ConfigOf<kDtypeKv>, AllFunctors>(c, {0.75f, meaning.slopes.data()}, meaning,
                                                       4, 5e-5);
}
TEST(PlainEmulated, E4m3) { check_fp8<E4m3, Dtype::kE4m3>(12); }
TEST(PlainEmulated, E5m2) { check_fp8<E5m2, Dtype::kE5m2>(13); }

}  // namespace
}  // namespace plait::test
