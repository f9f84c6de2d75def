// The sm90 kernel on the host (sm90_emulated.h): every loader, shapes with and without split keys,
// windows, shared pages, invariant mode.
#include "cuda/sm90_emulated.h"

#include "cuda/invariant_case.h"

namespace plait::test {
namespace {

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

}  // namespace
}  // namespace plait::test
