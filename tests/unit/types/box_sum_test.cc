#include "tensorbus/types/box_sum.h"

#include <array>
#include <gtest/gtest.h>

#include "tests/unit/types/make_box.h"

namespace tensorbus {
namespace {

BoxSum SumOf(std::initializer_list<std::pair<std::uint32_t, Box>> boxes) {
  BoxSum sum;
  for (const auto& [tensor, box] : boxes) sum.Add(tensor, box);
  return sum;
}

TEST(BoxSum, IsThatOfTheWholeHoweverItWasCut) {
  const BoxSum whole = SumOf({{3, MakeBox({{2, 10}, {0, 7}, {5, 9}})}});
  EXPECT_EQ(
      SumOf({{3, MakeBox({{2, 6}, {0, 7}, {5, 9}})}, {3, MakeBox({{6, 10}, {0, 7}, {5, 9}})}}),
      whole);
  EXPECT_EQ(SumOf({{3, MakeBox({{2, 10}, {0, 3}, {5, 9}})},
                   {3, MakeBox({{2, 3}, {3, 7}, {5, 9}})},
                   {3, MakeBox({{3, 10}, {3, 7}, {5, 6}})},
                   {3, MakeBox({{3, 10}, {3, 7}, {6, 9}})}}),
            whole);
}

TEST(BoxSum, TellsBoxesTensorsAndCountsApart) {
  const Box box = MakeBox({{0, 4}, {0, 8}});
  const BoxSum sum = SumOf({{0, box}});
  EXPECT_NE(SumOf({}), sum);
  EXPECT_NE(SumOf({{0, box}, {0, box}}), sum) << "twice";
  EXPECT_NE(SumOf({{1, box}}), sum) << "another tensor";
  EXPECT_NE(SumOf({{0, MakeBox({{0, 4}, {0, 7}})}}), sum) << "smaller";
  EXPECT_NE(SumOf({{0, MakeBox({{4, 8}, {0, 8}})}}), sum) << "moved";
  EXPECT_NE(SumOf({{0, MakeBox({{0, 8}, {0, 4}})}}), sum) << "turned";
  EXPECT_NE(SumOf({{0, MakeBox({{0, 32}})}}), sum) << "other dimensions";
  const Box other = MakeBox({{4, 8}, {0, 8}});
  EXPECT_NE(SumOf({{0, box}, {1, other}}), SumOf({{0, other}, {1, box}})) << "exchanged";
}

TEST(BoxSum, OfAScalarIsThere) {
  EXPECT_NE(SumOf({{0, Box()}}), BoxSum{});
  EXPECT_NE(SumOf({{0, Box()}}), SumOf({{1, Box()}}));
}

TEST(BoxSum, OfALayoutIsThatOfItsBoxes) {
  JobLayout layout;
  layout.rank_count = 3;
  const Box left = MakeBox({{0, 4}, {0, 8}});
  const Box right = MakeBox({{4, 8}, {0, 8}});
  layout.holdings = {Holding{{{0, {left}}, {2, {right}}}}, Holding{{{2, {left, right}}}}};
  layout.tensors.resize(3);
  layout.tensors[1].holding = 1;
  const std::vector<BoxSum> sums = BoxSumsOf(layout);
  ASSERT_EQ(sums.size(), 3U);
  EXPECT_EQ(sums[0], SumOf({{0, left}, {2, left}}));
  EXPECT_EQ(sums[1], BoxSum{});
  EXPECT_EQ(sums[2], SumOf({{0, right}, {1, left}, {1, right}, {2, right}}));
}

TEST(BoxSum, FindsTheOneTensorThatDiffers) {
  const Box box = MakeBox({{0, 4}, {0, 8}});
  const Box part = MakeBox({{0, 4}, {0, 7}});
  BoxSum all;
  for (std::uint32_t i = 0; i < 100; ++i) all.Add(i, box);
  for (const std::uint32_t odd : {0U, 41U, 99U}) {
    BoxSum damaged = all;
    damaged.Add(odd, part);
    EXPECT_EQ(DifferingTensor(all, damaged, 100), odd);
  }
  EXPECT_EQ(DifferingTensor(all, all, 100), -1);
  BoxSum two = all;
  two.Add(3, part);
  two.Add(4, part);
  EXPECT_EQ(DifferingTensor(all, two, 100), -1);
}

}  // namespace
}  // namespace tensorbus
