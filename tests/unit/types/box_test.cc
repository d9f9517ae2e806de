#include "tensorbus/types/box.h"

#include <array>

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

using testing::IsStatus;

TEST(Shape, RefusesTooManyDimensionsAndOverflowingProducts) {
  const std::array<std::uint64_t, 9> nine = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_THAT(Shape::Create(nine), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  const std::array<std::uint64_t, 3> huge = {std::uint64_t{1} << 40, 0, std::uint64_t{1} << 40};
  EXPECT_THAT(Shape::Create(huge), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(Box, ScalarHasOneElement) {
  const Box scalar = Box::Whole(Shape());
  EXPECT_FALSE(scalar.empty());
  EXPECT_EQ(scalar.volume(), 1U);
  EXPECT_TRUE(Intersect(scalar, scalar).has_value());
}

TEST(Box, IntersectionOfTouchingBoxesIsNone) {
  const std::array<Range, 2> left = {Range{0, 4}, Range{0, 5}};
  const std::array<Range, 2> right = {Range{4, 8}, Range{0, 5}};
  EXPECT_EQ(Intersect(Box(left), Box(right)), std::nullopt);
  const std::array<Range, 2> across = {Range{3, 8}, Range{2, 9}};
  const std::array<Range, 2> common = {Range{3, 4}, Range{2, 5}};
  EXPECT_EQ(Intersect(Box(left), Box(across)), Box(common));
}

}  // namespace
}  // namespace tensorbus
