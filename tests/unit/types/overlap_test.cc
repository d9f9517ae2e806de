#include <gtest/gtest.h>
#include <random>
#include <vector>

#include "tensorbus/types/box.h"
#include "tests/unit/types/make_box.h"

namespace tensorbus {
namespace {

/// Cuts `box` at random places into about `count` disjoint boxes that are not a grid.
void CutRandomly(std::mt19937& rng, const Box& box, int count, std::vector<Box>* out) {
  const auto dim = static_cast<int>(rng() % static_cast<unsigned>(box.rank()));
  if (count <= 1 || box[dim].size() < 2) {
    out->push_back(box);
    return;
  }
  Box low = box;
  Box high = box;
  low[dim].hi = high[dim].lo = box[dim].lo + 1 + rng() % (box[dim].size() - 1);
  CutRandomly(rng, low, count / 2, out);
  CutRandomly(rng, high, count - count / 2, out);
}

TEST(FindOverlap, FindsNoneInDisjointCuts) {
  std::mt19937 rng(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<Range> whole(1 + rng() % 4, Range{0, 1000});
    std::vector<Box> boxes;
    CutRandomly(rng, Box(whole), 1 + static_cast<int>(rng() % 300), &boxes);
    std::shuffle(boxes.begin(), boxes.end(), rng);
    EXPECT_EQ(FindOverlap(boxes), std::nullopt);
  }
}

TEST(FindOverlap, FindsThePairThatOverlaps) {
  std::mt19937 rng(2);
  for (int round = 0; round < 50; ++round) {
    std::vector<Range> whole(1 + rng() % 4, Range{0, 1000});
    std::vector<Box> boxes;
    CutRandomly(rng, Box(whole), 2 + static_cast<int>(rng() % 300), &boxes);
    Box extra = boxes[rng() % boxes.size()];
    const auto dim = static_cast<int>(rng() % whole.size());
    extra[dim].lo = extra[dim].hi - 1;
    boxes.insert(boxes.begin() + static_cast<std::ptrdiff_t>(rng() % boxes.size()), extra);
    const auto found = FindOverlap(boxes);
    ASSERT_TRUE(found.has_value());
    EXPECT_LT(found->first, found->second);
    EXPECT_TRUE(Intersect(boxes[found->first], boxes[found->second]).has_value());
  }
}

TEST(FindOverlap, TwoScalarsOverlap) {
  EXPECT_EQ(FindOverlap(std::vector<Box>{Box()}), std::nullopt);
  EXPECT_TRUE(FindOverlap(std::vector<Box>{Box(), Box()}).has_value());
}

TEST(FindOverlap, StaysFastOnManyRows) {
  std::vector<Box> rows;
  for (std::uint64_t i = 0; i < 200'000; ++i) rows.push_back(MakeBox({{i, i + 1}, {0, 4096}}));
  EXPECT_EQ(FindOverlap(rows), std::nullopt);
}

}  // namespace
}  // namespace tensorbus
