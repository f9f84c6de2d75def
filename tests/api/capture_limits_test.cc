// What a captured run() refuses of later plans; tests/gpu/test_graph.py has the captures.
#include "capture_limits.h"

#include <gtest/gtest.h>

#include "formats/tensors.h"

namespace plait {
namespace {

FormatView view_of(int num_query_tokens, long long max_block) {
  FormatView view;
  view.num_query_tokens = num_query_tokens;
  view.max_block = max_block;
  view.max_block_place = "kv_page_indices[17]";
  return view;
}

std::string refused(const CaptureLimits& limits, const FormatView& view, bool ragged = false) {
  return test::refusal([&] { limits.check_plan(view, ragged); });
}

TEST(CaptureLimits, NothingCapturedLimitsNothing) {
  EXPECT_EQ(refused({}, view_of(1 << 30, 1LL << 40)), "");
}

TEST(CaptureLimits, TheSmallestCaptureDecides) {
  CaptureLimits limits;
  limits.note(8, 100);
  limits.note(64, 20);
  limits.note(16, 50);
  EXPECT_EQ(refused(limits, view_of(8, 19)), "");
  EXPECT_EQ(refused(limits, view_of(0, -1)), "");  // -1: no host table
  EXPECT_EQ(refused(limits, view_of(9, 19)),
            "plan: 9 query tokens, but a captured run() has 8 rows of q, and a replay of it would "
            "read beyond; use another Attention for such plans");
  EXPECT_EQ(refused(limits, view_of(8, 20)),
            "plan: kv_page_indices[17] is 20, but a captured run() has 20 pages of cache, and a "
            "replay of it would read beyond; use another Attention for such plans");
  EXPECT_NE(refused(limits, view_of(8, 20), true).find("a captured run() has 20 rows of k"),
            std::string::npos);
}

}  // namespace
}  // namespace plait
