#include "tensorbus/types/lattice.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace tensorbus {
namespace {

struct Strided {
  std::uint64_t begin = 0;
  std::vector<std::uint64_t> extents;
  std::vector<std::uint64_t> strides;

  Lattice Make(std::uint64_t item) const { return Lattice(begin, item, extents, strides); }
};

/// Every byte, by counting through all indices.
std::vector<std::uint64_t> Bytes(const Strided& block, std::uint64_t item) {
  std::vector<std::uint64_t> starts = {block.begin};
  for (std::size_t d = 0; d < block.extents.size(); ++d) {
    std::vector<std::uint64_t> next;
    for (const std::uint64_t start : starts) {
      for (std::uint64_t i = 0; i < block.extents[d]; ++i)
        next.push_back(start + i * block.strides[d]);
    }
    starts = std::move(next);
  }
  std::vector<std::uint64_t> bytes;
  for (const std::uint64_t start : starts) {
    for (std::uint64_t b = 0; b < item; ++b) bytes.push_back(start + b);
  }
  std::sort(bytes.begin(), bytes.end());
  return bytes;
}

/// A block whose strides are nested, in random order of dimensions, sometimes with gaps.
Strided RandomNested(std::mt19937& rng, std::uint64_t item) {
  Strided block;
  block.begin = rng() % 40;
  std::uint64_t span = item;
  for (unsigned d = rng() % 4; d > 0; --d) {
    const std::uint64_t extent = 1 + rng() % 4;
    const std::uint64_t stride = span + (rng() % 2) * (rng() % 9);
    block.extents.push_back(extent);
    block.strides.push_back(stride);
    span += (extent - 1) * stride;
  }
  for (std::size_t d = block.extents.size(); d > 1; --d) {
    const std::size_t other = rng() % d;
    std::swap(block.extents[d - 1], block.extents[other]);
    std::swap(block.strides[d - 1], block.strides[other]);
  }
  return block;
}

TEST(Lattice, AgreesWithCountingBytes) {
  std::mt19937 rng(3);
  int overlapping = 0;
  for (int round = 0; round < 20'000; ++round) {
    const std::uint64_t item = std::uint64_t{1} << (rng() % 3);
    const Strided a = RandomNested(rng, item);
    const Strided b = RandomNested(rng, item);
    const std::vector<std::uint64_t> bytes_a = Bytes(a, item);
    const std::vector<std::uint64_t> bytes_b = Bytes(b, item);
    ASSERT_TRUE(a.Make(item).SelfDisjoint());
    ASSERT_EQ(a.Make(item).end(), bytes_a.back() + 1);
    std::vector<std::uint64_t> common;
    std::set_intersection(bytes_a.begin(), bytes_a.end(), bytes_b.begin(), bytes_b.end(),
                          std::back_inserter(common));
    std::uint64_t budget = kMaxOverlapSteps;
    const LatticeRelation relation = Compare(a.Make(item), b.Make(item), &budget);
    ASSERT_EQ(relation,
              common.empty() ? LatticeRelation::kDisjoint : LatticeRelation::kOverlapping);
    overlapping += common.empty() ? 0 : 1;
  }
  EXPECT_GT(overlapping, 1000);
  EXPECT_LT(overlapping, 19'000);
}

TEST(Lattice, SelfOverlapIsSeen) {
  EXPECT_FALSE((Strided{0, {4, 4}, {2, 1}}.Make(1).SelfDisjoint()));
  EXPECT_FALSE((Strided{0, {4}, {0}}.Make(1).SelfDisjoint()));
  EXPECT_FALSE((Strided{0, {4}, {2}}.Make(4).SelfDisjoint()));
  EXPECT_TRUE((Strided{0, {1, 4}, {0, 4}}.Make(4).SelfDisjoint()));
}

TEST(Lattice, InterleavedHugeBuffersTakeFewSteps) {
  // Even and odd rows of 2^30 bytes each.
  const Strided even{0, {1 << 20, 1024}, {2048, 1}};
  const Strided odd{1024, {1 << 20, 1024}, {2048, 1}};
  std::uint64_t budget = 100;
  EXPECT_EQ(Compare(even.Make(1), odd.Make(1), &budget), LatticeRelation::kDisjoint);
}

TEST(Lattice, GivesUpWhenTheBudgetIsSpent) {
  const Strided a{0, {1000, 2}, {16, 2}};
  const Strided b{1, {1000}, {18}};
  std::uint64_t budget = 3;
  EXPECT_EQ(Compare(a.Make(1), b.Make(1), &budget), LatticeRelation::kUndecided);
}

}  // namespace
}  // namespace tensorbus
