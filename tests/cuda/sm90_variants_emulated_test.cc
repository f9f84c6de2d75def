// The sm90 kernel on the host (sm90_emulated.h): head dims, functors, mask bits, the second stage
// with transforms and fp8; and warps that fall asleep.
#include "cuda/sm90_emulated.h"

namespace plait::test {
namespace {

// Panels that are not full, k16 steps and accumulators beyond the head dim, more panels of O than
// of the buffer that joins it.
template <KernelConfig kConfig>
void check_dims(int page_size, unsigned seed) {
  SCOPED_TRACE(kConfig.head_dim_qk);
  const auto c = make_case<Float16>(shape_of(kConfig, page_size), {1, -1, 0}, {1, 40, 0},
                                    {3 * kConfig.tile_kv - 1, 130, 3}, 0, seed);
  run_sm90<kConfig>(c, 2);
}
TEST(Sm90Emulated, HeadDims) {
  constexpr Dtype kHalf = Dtype::kFloat16;
  check_dims<config_of(8, 8, 64, 2, 1, kHalf)>(0, 8);
  check_dims<with_loader(config_of(40, 24, 64, 3, 1, kHalf), Loader::kGather)>(3, 9);
  check_dims<with_split(with_loader(config_of(64, 56, 112, 6, 3, kHalf), Loader::kPaged))>(64, 13);
  check_dims<with_split(with_loader(config_of(72, 200, 32, 2, 2, kHalf), Loader::kPaged))>(16, 10);
  check_dims<with_split(with_loader(config_of(192, 128, 96, 2, 2, kHalf), Loader::kPaged))>(64, 11);
  check_dims<with_split(with_loader(config_of(256, 256, 48, 2, 2, kHalf), Loader::kGather))>(5, 12);
}
TEST(Sm90Emulated, FunctorsOnPages) {
  const auto c =
      make_case<Bfloat16>(shape_of(kSmall, 16), {1, -1, 0}, {1, 6, 1}, {200, 40, 0}, 0, 7);
  SigmoidMeaning meaning;
  meaning.use_softmax = false;
  meaning.bias = -3;
  run_sm90<with_loader(kSmall, Loader::kPaged), Sigmoid>(c, 2, {-3.0f}, meaning);
}

template <KernelConfig kConfig, class T>
void check_mask(Case<T> c, int num_ctas) {
  c.view.request_mask_begin.assign(c.view.num_requests, kMaskBegin);
  run_sm90<kConfig, CustomMask>(c, num_ctas, {}, MaskMeaning{});
}
// Tiles before the bits, with their first one, and behind it; lists that start within a word.
TEST(Sm90Emulated, CustomMask) {
  check_mask<kSmall>(make_case<Bfloat16>(shape_of(kSmall, 0), {}, {1, 6, 2}, {197, 75, 69}, 0, 11),
                     2);
  check_mask<with_loader(kBoth, Loader::kPaged)>(
      make_case<Bfloat16>(shape_of(kBoth, 16), {1, -1, 0}, {1, 4, 30}, {390, 4, 160}, 45, 12), 3);
  constexpr KernelConfig kOddTile = config_of(64, 64, 48, 2, 1);  // no whole words
  check_mask<kOddTile>(make_case<Bfloat16>(shape_of(kOddTile, 0), {}, {6, 2}, {197, 97}, 0, 13), 2);
}

// Tiles before the first masked key do not look at bits, whatever the loader.
template <KernelConfig kConfig>
void check_bits_before_the_mask(int page_size) {
  auto c = make_case<Bfloat16>(shape_of(kConfig, page_size), {1, -1, 0}, {1, 6, 9}, {197, 75, 140},
                               0, 17);
  c.view.request_mask_begin.assign(c.view.num_requests, kMaskBegin);
  MaskMeaning meaning;
  meaning.false_bits_end = kMaskBegin / kConfig.tile_kv * kConfig.tile_kv;
  run_sm90<kConfig, CustomMask>(c, 3, {}, meaning);
}
TEST(Sm90Emulated, CustomMaskCostsNothingBeforeItsKeys) {
  constexpr KernelConfig kConfig = with_split(config_of(64, 64, 32, 2, 2));
  check_bits_before_the_mask<kConfig>(0);
  check_bits_before_the_mask<with_loader(kConfig, Loader::kPaged)>(16);
  check_bits_before_the_mask<with_loader(kConfig, Loader::kGather)>(3);
}

// Row transforms in the finish warps, two and three of them. What they leave is rounded to
// bfloat16.
TEST(Sm90Emulated, NormAndRope) {
  RopeOptions options;
  options.theta = 500;
  const std::vector<unsigned long long> table = rope_table(options, 128);
  NormAndRopeMeaning meaning;
  meaning.eps = 1e-5;
  meaning.theta = 500;
  for (int i = 0; i < 128; ++i) meaning.weight.push_back(0.125f + i % 3 / 8.0f);
  constexpr double kLse = 2e-3;
  const NormAndRope::Params params{{1e-5f, meaning.weight.data()}, {table.data()}};
  const auto ragged =
      make_case<Bfloat16>(shape_of(kSmall, 0), {1, -1, 0}, {1, 6, 0, 2}, {193, 40, 5, 65}, 0, 8);
  run_sm90<kSmall, NormAndRope>(ragged, 2, params, meaning, kLse);
  const auto paged =
      make_case<Bfloat16>(shape_of(kBoth, 16), {1, -1, 0}, {1, 4, 30}, {70, 4, 160}, 150, 9);
  run_sm90<with_loader(kBoth, Loader::kPaged), NormAndRope>(paged, 3, params, meaning, kLse);
  const auto short_units = make_case<Bfloat16>(shape_of(kSmall, 16), {1, -1, 0}, {1, 0, 2, 1, 4},
                                               {67, 9, 0, 128, 65}, 0, 15);
  run_sm90<with_loader(with_rows(kSmall, 64, 1), Loader::kPaged), NormAndRope>(
      short_units, 2, params, meaning, kLse);
  run_sm90<with_loader(with_rows(kSmall, 16, 2), Loader::kPaged), NormAndRope>(
      short_units, 2, params, meaning, kLse);
  const auto gathered =
      make_case<Bfloat16>(shape_of(kBoth, 3), {1, -1, 0}, {1, 30}, {300, 130}, 0, 10);
  run_sm90<with_loader(kBoth, Loader::kGather), NormAndRope>(gathered, 2, params, meaning, kLse);
}

// fp8 K and V land in a ring of their own, shorter or longer than that of the tiles; every loader,
// panels that are not full, both shapes; then row transforms, which must see values.
constexpr KernelConfig with_fp8(KernelConfig config, Dtype dtype_kv, int landing_stages) {
  config.dtype_kv = dtype_kv;
  config.num_landing_stages = landing_stages;
  return config;
}
template <KernelConfig kConfig, class T, class Kv>
void check_fp8(int page_size, const std::vector<int>& q_lens, const std::vector<int>& kv_lens,
               int num_ctas, unsigned seed) {
  SCOPED_TRACE(seed);
  auto c = make_case<T, Kv>(shape_of(kConfig, page_size), {1, -1, 0}, q_lens, kv_lens, 0, seed);
  c.k_scale = 0.75f;
  c.v_scale = 1.5f;
  run_sm90<kConfig>(c, num_ctas);
}
TEST(Sm90Emulated, Fp8) {
  constexpr Dtype kE4m3 = Dtype::kE4m3, kE5m2 = Dtype::kE5m2, kHalf = Dtype::kFloat16;
  const std::vector<int> few{1, 5, 0, 2}, keys{67, 328, 9, 2};
  check_fp8<with_fp8(with_rows(config_of(128, 128, 48, 2, 1), 16, 2), kE4m3, 4), Bfloat16, E4m3>(
      0, few, keys, 2, 60);
  check_fp8<with_fp8(with_loader(config_of(64, 128, 64, 3, 1), Loader::kPaged), kE5m2, 2), Bfloat16,
            E5m2>(16, few, keys, 3, 61);
  check_fp8<with_fp8(with_loader(config_of(128, 64, 64, 2, 1, kHalf), Loader::kGather), kE4m3, 3),
            Float16, E4m3>(3, few, keys, 2, 62);
  check_fp8<with_fp8(with_loader(with_split(config_of(48, 144, 32, 2, 2, kHalf)), Loader::kGather),
                     kE5m2, 5),
            Float16, E5m2>(1, {1, 60}, {300, 130}, 2, 63);
  check_fp8<with_fp8(with_loader(with_split(config_of(192, 128, 64, 2, 2)), Loader::kPaged), kE4m3,
                     2),
            Bfloat16, E4m3>(8, {1, 60}, {391, 129}, 5, 64);
}
// A gathered tile holds the last key again behind the keys. Where values become other ones, what
// lies there must not come through: NaN, of which the transform makes a number.
struct NanToOne {
  struct Params {};
  template <class R>
  PLAIT_HD static void value_transform(const Params&, const RowContext&, R& row) {
    row.map([](int, float x) { return x == x ? x : 1.0f; });
  }
};
struct NanToOneMeaning : PlainMeaning {
  void value(std::vector<double>& x) const {
    for (double& v : x) v = v == v ? v : 1.0;
  }
};
template <KernelConfig kConfig, class T, class Kv>
void check_nan_to_one(unsigned seed) {
  SCOPED_TRACE(seed);
  auto c = make_case<T, Kv>(shape_of(kConfig, 3), {1, -1, 0}, {1, 6}, {67, 10}, 0, seed);
  const std::size_t row = static_cast<std::size_t>(c.shape.num_kv_heads) * c.shape.head_dim_vo;
  for (const KeyList& list : c.lists) {
    std::fill_n(c.v.data.begin() + list.slots.back() * row, row,
                from_float<Kv>(std::numeric_limits<float>::quiet_NaN()));
  }
  run_sm90<kConfig, NanToOne>(c, 2, {}, NanToOneMeaning{});
}
TEST(Sm90Emulated, RowsBehindTheKeysOfGatheredValues) {
  constexpr KernelConfig kGather = with_loader(config_of(64, 64, 64, 2, 1), Loader::kGather);
  check_nan_to_one<kGather, Bfloat16, Bfloat16>(67);
  check_nan_to_one<with_fp8(kGather, Dtype::kE4m3, 2), Bfloat16, E4m3>(68);
}
TEST(Sm90Emulated, Fp8WithTransforms) {
  constexpr KernelConfig kConfig =
      with_fp8(config_of(64, 48, 64, 2, 1, Dtype::kFloat16), Dtype::kE4m3, 3);
  AllFunctorsMeaning meaning;
  meaning.bias = 0.75;
  const auto check = [&](auto run, int page_size, unsigned seed) {
    auto c = make_case<Float16, E4m3>(shape_of(kConfig, page_size), {1, -1, 0}, {1, 6, 1},
                                      {200, 40, 0}, 0, seed);
    c.k_scale = 0.5f;
    c.v_scale = 0.25f;
    meaning.slopes.assign(c.num_qo_heads(), 0.01f);
    run(c);
  };
  check(
      [&](const auto& c) {
        run_sm90<kConfig, AllFunctors>(c, 3, {0.75f, meaning.slopes.data()}, meaning, 5e-3);
      },
      0, 65);
  check(
      [&](const auto& c) {
        run_sm90<with_loader(kConfig, Loader::kGather), AllFunctors>(
            c, 3, {0.75f, meaning.slopes.data()}, meaning, 5e-3);
      },
      5, 66);
}

// Warps that fall asleep where they meet others, and boxes that land late: loaders, finishers and
// consumers each wait for each. Units of many tiles, of one and of none; then split keys.
template <KernelConfig kConfig, class V = Standard, class T = Bfloat16, class Kv = T,
          class Meaning = PlainMeaning>
void check_naps(unsigned seed, int page_size, const typename V::Params& variant = {},
                const Meaning& meaning = {}, double lse_tolerance = 2e-5) {
  SCOPED_TRACE(seed);
  Shape shape = shape_of(kConfig, page_size);
  shape.group_size = 5;
  emulate::mode.late_boxes = emulate::mode.naps = seed;
  run_sm90<kConfig, V>(
      make_case<T, Kv>(shape, {1, -1, 0}, {5, 30, 0, 5, 13}, {0, 70, 9, 150, 33}, 0, seed), 2,
      variant, meaning, lse_tolerance);
  run_sm90<kConfig, V>(
      make_case<T, Kv>(shape, {1, -1, 0}, {5, 1, 5}, {3, 10 * kConfig.tile_kv, 70}, 0, seed), 1,
      variant, meaning, lse_tolerance);
  emulate::mode.late_boxes = emulate::mode.naps = 0;
}
TEST(Sm90Emulated, WarpsThatFallAsleep) {
  check_naps<with_split(with_loader(config_of(64, 64, 32, 2, 3), Loader::kPaged))>(1, 16);
  check_naps<with_split(with_loader(config_of(64, 64, 32, 4, 2), Loader::kGather))>(2, 3);
  check_naps<with_rows(config_of(64, 64, 32, 3, 1), 32, 2)>(1, 0);
  check_naps<with_split(config_of(64, 64, 32, 2, 3))>(1, 0);
}
TEST(Sm90Emulated, WarpsThatFallAsleepInASecondStage) {
  constexpr KernelConfig kPages = with_loader(config_of(64, 64, 32, 2, 2), Loader::kPaged);
  AllFunctorsMeaning meaning;
  meaning.bias = 0.75;
  meaning.slopes.assign(16, 0.01f);
  const AllFunctors::Params params{0.75f, meaning.slopes.data()};
  check_naps<with_split(kPages), AllFunctors>(1, 16, params, meaning, 2e-2);
  check_naps<with_rows(with_loader(config_of(64, 64, 32, 3, 1), Loader::kGather), 32, 1),
             AllFunctors>(2, 3, params, meaning, 2e-2);
  constexpr Dtype kE4m3 = Dtype::kE4m3;
  check_naps<with_fp8(with_split(kPages), kE4m3, 2), Standard, Bfloat16, E4m3>(3, 16);
  check_naps<with_fp8(with_loader(config_of(64, 64, 32, 2, 1), Loader::kGather), kE4m3, 4),
             Standard, Bfloat16, E4m3>(4, 3);
}

}  // namespace
}  // namespace plait::test
