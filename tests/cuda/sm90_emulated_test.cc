// kernels/sm90 executed on the host, one CTA at a time: every loader, shapes with and without split
// keys, head dims, against float64 with NaN wherever no list has a key. The instructions stand in
// tests/cuda/emulated/ptx; what is proven is where things lie, who waits for whom and what is
// computed, not what the hardware makes of it.
// clang-format off
#include "cuda/emulate.h"  // before any kernel
// clang-format on

#include "cuda/emulated_case.h"
#include "cuda/invariant_case.h"
#include "cuda/row_units.h"
#include "cuda/sm90_tiles.h"
#include "cuda/tensor_maps.h"
#include "sm90/attention.cuh"

namespace plait::test {
namespace {

PlanTarget target_of(const KernelConfig& config, const Shape& shape, int num_ctas) {
  PlanTarget target;
  target.num_ctas = num_ctas;
  target.tile_kv = config.tile_kv;
  target.kv_align = cuda::kv_align(config, shape.affine ? 1 : shape.page_size);
  target.chunk_keys = config.chunk_keys;
  target.group_size = shape.group_size;
  target.num_kv_heads = shape.num_kv_heads;
  target.num_shapes = config.num_shapes;
  for (int i = 0; i < config.num_shapes; ++i) {
    target.shapes[i] = {config.shapes[i].tile_q, config.shapes[i].key_split, 0.1f, 0.1f};
  }
  target.merge_us = 0.1f;
  target.max_partial_rows = 100000;
  target.queue_percent = 30;  // a queue where the batch is long enough
  target.min_queued_keys = 64;
  target.min_keys_for_queue = 192;
  return target;
}

// As in emulated_case.h, with the sm90 kernel of `kConfig`, in both orders of threads. Inputs, P
// and the result are rounded to 16 bits.
template <KernelConfig kConfig, class V = Standard, class T, class Kv, class Meaning = PlainMeaning>
int run_sm90(const Case<T, Kv>& c, int num_ctas, const typename V::Params& variant = {},
             const Meaning& meaning = {}, double lse_tolerance = 2e-5,
             EmulatedOutput* output = nullptr) {
  const int page_size = c.shape.affine ? 0 : c.shape.page_size;
  ptx::MappedTensor tensors[2];
  Sm90Call<V> call{};
  call.maps.box_rows = kConfig.loader == Loader::kAffine
                           ? kConfig.tile_kv
                           : cuda::box_rows_of(page_size, kConfig.tile_kv);
  const auto kernel = [&](const VariantCall<V>& given) {
    const Params& p = given.params;
    if (threadIdx.x == 0) {
      call.params = p;
      call.variant = given.variant;
      const auto map = [&](int i, TensorMap& to, const void* data, int dim,
                           const KvStrides& stride) {
        tensors[i] = {static_cast<const unsigned char*>(data),
                      cuda::kv_map_shape(dim, p.num_kv_heads, p.num_kv_blocks, page_size, stride,
                                         call.maps.box_rows, bytes_of(kConfig.dtype_kv))};
        const ptx::MappedTensor* address = &tensors[i];
        std::memcpy(&to, &address, sizeof address);
      };
      call.maps.block_size = divisor_of(p.block_size);
      const auto units = [&](const char* name, const KvStrides& stride) {
        return cuda::row_units(name, stride, p.num_kv_blocks, p.block_size,
                               bytes_of(kConfig.dtype_kv));
      };
      if (kConfig.loader == Loader::kGather) call.maps.k_units = units("k", p.k_stride);
      if (kConfig.loader == Loader::kGather) call.maps.v_units = units("v", p.v_stride);
      map(0, call.maps.k, p.k, kConfig.head_dim_qk, p.k_stride);
      map(1, call.maps.v, p.v, kConfig.head_dim_vo, p.v_stride);
    }
    __syncthreads();
    sm90::attention<kConfig, V>(call);
  };
  const double tolerance = kConfig.dtype_q == Dtype::kFloat16 ? 1.0 / 1024 : 1.0 / 128;
  int merged = 0;
  for (const bool early : {false, true}) {
    SCOPED_TRACE(early ? "last thread first" : "first thread first");
    emulate::mode.last_first = emulate::mode.early_copies = early;
    merged = run_emulated<V>(c, variant, meaning, target_of(kConfig, c.shape, num_ctas),
                             sm90::num_threads(kConfig), kernel, tolerance, lse_tolerance, output);
  }
  emulate::mode.last_first = emulate::mode.early_copies = false;
  return merged;
}

constexpr KernelConfig with_loader(KernelConfig config, Loader loader) {
  config.loader = loader;
  return config;
}
constexpr KernelConfig config_of(int dim_qk, int dim_vo, int tile_kv, int stages, int consumers,
                                 Dtype dtype = Dtype::kBfloat16) {
  KernelConfig config{.dtype_q = dtype,
                      .dtype_kv = dtype,
                      .dtype_out = dtype,
                      .head_dim_qk = dim_qk,
                      .head_dim_vo = dim_vo,
                      .loader = Loader::kAffine,
                      .tile_kv = tile_kv,
                      .num_stages = stages,
                      .num_q_stages = 2,
                      .num_consumer_warpgroups = consumers,
                      .producer_registers = 24,
                      .consumer_registers = 128,
                      .ctas_per_sm = 1,
                      .num_shapes = 1,
                      .shapes = {{Mma::kWgmma, 64 * consumers, 1}}};
  return config;
}
constexpr KernelConfig kSmall = config_of(128, 128, 64, 3, 1);
// One warpgroup that has only this many rows of Q.
constexpr KernelConfig with_rows(KernelConfig config, int tile_q, int q_stages) {
  config.shapes[0].tile_q = tile_q;
  config.num_q_stages = q_stages;
  return config;
}
constexpr KernelConfig with_split(KernelConfig config) {
  config.num_shapes = 2;
  config.shapes[1] = {Mma::kWgmma, 64, config.num_stages % 3 == 0 ? 3 : 2};
  return config;
}
constexpr KernelConfig kBoth = with_split(config_of(128, 128, 128, 2, 2));

Shape shape_of(const KernelConfig& config, int page_size) {  // 0: affine
  Shape shape;
  shape.head_dim_qk = config.head_dim_qk;
  shape.head_dim_vo = config.head_dim_vo;
  shape.affine = page_size == 0;
  shape.page_size = page_size;
  return shape;
}

template <KernelConfig kConfig>
void run_invariant(const Case<Bfloat16>& c, int num_ctas, EmulatedOutput* output) {
  run_sm90<kConfig>(c, num_ctas, {}, {}, 2e-5, output);
}
TEST(Sm90Emulated, InvariantBits) {
  expect_invariant<Bfloat16>(
      shape_of(config_of(64, 64, 64, 2, 1), 0),
      run_invariant<with_chunks(with_rows(config_of(64, 64, 64, 4, 1), 16, 2))>,
      run_invariant<with_chunks(config_of(64, 64, 64, 2, 2))>);
}

TEST(Sm90Emulated, AffineDecode) {
  const auto c = make_case<Bfloat16>(shape_of(kSmall, 0), {}, {1, 5, 0, 2}, {67, 128, 9, 1}, 0, 1);
  run_sm90<kSmall>(c, 2);
}
// Many short units a CTA, some without keys; Q's buffers hold less than a wgmma's rows, and there
// are one or two of them.
TEST(Sm90Emulated, FewRowsAndUnitsOfFewTiles) {
  const auto c = make_case<Bfloat16>(shape_of(kSmall, 16), {1, -1, 0}, {1, 2, 0, 1, 4, 1, 3},
                                     {67, 128, 9, 0, 300, 1, 65}, 0, 14);
  run_sm90<with_loader(with_rows(kSmall, 16, 2), Loader::kPaged)>(c, 2);
  run_sm90<with_loader(with_rows(kSmall, 32, 1), Loader::kPaged)>(c, 3);
  EXPECT_GT(run_sm90<with_loader(with_rows(kSmall, 16, 2), Loader::kGather)>(c, 12), 0);
  EXPECT_GT(run_sm90<with_loader(with_rows(kSmall, 64, 1), Loader::kGather)>(c, 12), 0);
}
TEST(Sm90Emulated, AffineBothShapesSplitAndCausal) {
  const auto c = make_case<Bfloat16>(shape_of(kBoth, 0), {1, -1, 0}, {1, 60}, {1500, 200}, 0, 2);
  EXPECT_GT(run_sm90<kBoth>(c, 5), 0);
}
// Prefill of unequal lengths: a CTA has units of both shapes one after the other, in any order.
TEST(Sm90Emulated, ShapesInTurn) {
  const std::vector<int> lengths = {101, 70, 33, 150, 9, 47};
  const auto c = make_case<Bfloat16>(shape_of(kBoth, 0), {1, -1, 0}, lengths, lengths, 0, 15);
  for (const int num_ctas : {2, 5}) run_sm90<kBoth>(c, num_ctas);
  const auto longer = make_case<Bfloat16>(shape_of(kBoth, 0), {1, -1, 0}, {21, 50, 21, 64, 20, 7},
                                          {900, 700, 641, 300, 129, 520}, 0, 16);
  run_sm90<kBoth>(longer, 1);
}
// A window's first tile begins where its keys do: in the middle of a tile of the list.
TEST(Sm90Emulated, WindowsBeginWithinATile) {
  const auto run = [](auto run_one, int page_size) {
    const auto c = make_case<Bfloat16>(shape_of(kBoth, page_size), {1, 40, 0}, {1, 60, 3},
                                       {300, 330, 177}, 0, 19);
    run_one(c);
  };
  run([](const auto& c) { run_sm90<kBoth>(c, 2); }, 0);
  run([](const auto& c) { run_sm90<with_loader(kBoth, Loader::kPaged)>(c, 2); }, 16);
  run([](const auto& c) { run_sm90<with_loader(kBoth, Loader::kGather)>(c, 2); }, 1);
}
TEST(Sm90Emulated, Gather) {
  const auto c = make_case<Bfloat16>(shape_of(kBoth, 3), {1, -1, 0}, {1, 60}, {300, 130}, 0, 3);
  run_sm90<with_loader(kBoth, Loader::kGather)>(c, 2);
}
// Pages against boxes and tiles; lengths before, at and behind the edges of both.
TEST(Sm90Emulated, PagesByBoxes) {
  for (const int page : {8, 16, 24, 48, 64, 256}) {
    SCOPED_TRACE(page);
    const auto small = make_case<Bfloat16>(shape_of(kSmall, page), {}, {1, 1, 3, 1, 0},
                                           {page - 1, page, 65, page + 1, 7}, 0, 4);
    run_sm90<with_loader(kSmall, Loader::kPaged)>(small, 2);
  }
  for (const int page : {8, 48, 128}) {
    SCOPED_TRACE(page);
    const auto both =
        make_case<Bfloat16>(shape_of(kBoth, page), {1, -1, 0}, {1, 50}, {391, 129}, 0, 5);
    run_sm90<with_loader(kBoth, Loader::kPaged)>(both, 2);
  }
}
// Tiles of other sizes, as a name may ask for: keys that are no power of two nor multiple of 32.
constexpr KernelConfig kOdd = with_split(config_of(128, 128, 144, 2, 2));
constexpr KernelConfig kOneBuffer = [] {
  KernelConfig config = config_of(128, 128, 176, 2, 2);
  config.num_q_stages = 1;
  return config;
}();
TEST(Sm90Emulated, TilesOf176KeysAndOneBufferOfQ) {
  const auto pages =
      make_case<Bfloat16>(shape_of(kOneBuffer, 16), {1, -1, 0}, {1, 90}, {365, 177}, 0, 53);
  run_sm90<with_loader(kOneBuffer, Loader::kPaged)>(pages, 2);
}
constexpr KernelConfig kThree = with_split(config_of(128, 128, 80, 2, 3));
constexpr KernelConfig kThreeSplit =
    with_loader(with_split(config_of(128, 128, 80, 3, 3)), Loader::kPaged);
TEST(Sm90Emulated, TilesOf192Rows) {
  const auto pages =
      make_case<Bfloat16>(shape_of(kThree, 16), {1, -1, 0}, {1, 110, 50}, {365, 177, 50}, 0, 54);
  run_sm90<kThreeSplit>(pages, 2);
  const auto affine =
      make_case<Bfloat16>(shape_of(kThree, 0), {1, -1, 0}, {100, 3}, {160, 900}, 0, 55);
  EXPECT_GT(run_sm90<kThree>(affine, 4), 0);
  const auto longer = make_case<Bfloat16>(shape_of(kThree, 3), {1, -1, 0}, {21, 70, 15, 64, 20, 7},
                                          {600, 430, 401, 200, 81, 320}, 0, 56);
  run_sm90<with_loader(kThree, Loader::kGather)>(longer, 1);
}
// Boxes that land late and out of order: nobody takes a phase of a barrier for another.
template <KernelConfig kConfig>
void check_late_boxes(unsigned seed) {
  SCOPED_TRACE(seed);
  Shape shape = shape_of(kConfig, 16);
  shape.group_size = 5;
  const auto split = make_case<Bfloat16>(shape, {1, -1, 0}, {5, 0, 5, 5},
                                         {5, 0, 10 * kConfig.tile_kv, 0}, 0, seed);
  const auto both =
      make_case<Bfloat16>(shape, {1, -1, 0}, {5, 50, 5, 40}, {0, 90, 70, 240}, 0, seed);
  emulate::mode.late_boxes = seed;
  run_sm90<with_loader(kConfig, Loader::kPaged)>(split, 1);
  run_sm90<with_loader(kConfig, Loader::kPaged)>(both, 2);
  emulate::mode.late_boxes = 0;
}
TEST(Sm90Emulated, BoxesThatLandLate) {
  check_late_boxes<with_split(config_of(64, 64, 32, 2, 3))>(1);  // one warpgroup is idle
  check_late_boxes<with_split(config_of(64, 64, 32, 3, 3))>(2);
  check_late_boxes<with_split(config_of(64, 64, 32, 4, 2))>(1);
  check_late_boxes<with_rows(config_of(64, 64, 32, 3, 1), 32, 2)>(2);
}
// Units without keys, whose rows are empty, before and behind one of many tiles.
TEST(Sm90Emulated, UnitsWithoutKeysInARow) {
  Shape shape = shape_of(kThree, 16);
  shape.group_size = 5;
  const auto c = make_case<Bfloat16>(shape, {1, -1, 0}, {5, 5, 5, 5, 5, 5, 5, 5},
                                     {0, 0, 0, 5, 0, 900, 0, 0}, 0, 57);
  for (const int num_ctas : {1, 7}) run_sm90<kThreeSplit>(c, num_ctas);
}
TEST(Sm90Emulated, TilesOf144Keys) {
  const auto affine =
      make_case<Bfloat16>(shape_of(kOdd, 0), {1, -1, 0}, {1, 60}, {433, 145}, 0, 50);
  run_sm90<kOdd>(affine, 3);
  const auto pages =
      make_case<Bfloat16>(shape_of(kOdd, 64), {1, -1, 0}, {1, 50}, {433, 143}, 0, 51);
  run_sm90<with_loader(kOdd, Loader::kPaged)>(pages, 2);
  const auto gather =
      make_case<Bfloat16>(shape_of(kOdd, 3), {1, -1, 0}, {1, 50}, {289, 144}, 0, 52);
  run_sm90<with_loader(kOdd, Loader::kGather)>(gather, 2);
}
TEST(Sm90Emulated, SharedPagesThroughARowMap) {
  const auto c =
      make_case<Bfloat16>(shape_of(kBoth, 16), {1, -1, 0}, {1, 4, 2}, {70, 4, 2}, 150, 6);
  EXPECT_GT((run_sm90<with_loader(kBoth, Loader::kPaged)>(c, 3)), 0);
}
// Every unit of a composed format leaves partial rows: a CTA tells of some together, of more than
// it keeps a list of, of several tokens each and of one.
TEST(Sm90Emulated, PartsOneAfterTheOther) {
  const std::vector<int> q_lens(41, 1);
  std::vector<int> kv_lens;
  for (int i = 0; i < 41; ++i) kv_lens.push_back(7 * i % 40 + 1);
  const auto c = make_case<Bfloat16>(shape_of(kSmall, 16), {1, -1, 0}, q_lens, kv_lens, 37, 60);
  for (const int num_ctas : {1, 3}) {
    EXPECT_GT((run_sm90<with_loader(kSmall, Loader::kPaged)>(c, num_ctas)), 2 * 41);
  }
}
// Block lists that only the device knows, of a level of shared pages and one of others.
TEST(Sm90Emulated, ListsOfTheDevice) {
  auto paged =
      make_case<Bfloat16>(shape_of(kSmall, 16), {1, -1, 0}, {1, 4, 2}, {70, 4, 2}, 150, 18);
  paged.device_lists = true;
  EXPECT_GT((run_sm90<with_loader(kSmall, Loader::kPaged)>(paged, 3)), 0);
  auto gathered = make_case<Bfloat16>(shape_of(kSmall, 3), {1, -1, 0}, {1, 0, 4, 2, 1},
                                      {70, 9, 4, 0, 65}, 150, 19);
  gathered.device_lists = true;
  EXPECT_GT((run_sm90<with_loader(kSmall, Loader::kGather)>(gathered, 2)), 0);
}
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
