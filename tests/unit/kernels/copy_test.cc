#include "tensorbus/kernels/copy.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <span>
#include <string>
#include <vector>

#include "tests/testing/random_blocks.h"
#include "tests/unit/kernels/slow_sum.h"

namespace tensorbus::kernels {
namespace {

using testing::BytesOf;
using testing::Pick;
using testing::Place;
using testing::PlacedBlock;
using testing::Random;
using testing::RandomBox;
using testing::WithBytes;

struct Pair {
  PlacedBlock source;
  PlacedBlock target;
};

Pair RandomPair(Random& random, std::uint64_t bytes_max) {
  const StridedBlock box = RandomBox(random, bytes_max);
  return {Place(random, box), Place(random, box)};
}

/// Copies in one of the ways this folder offers, in up to three parts, and returns the sums it
/// made.
CopySums CopyInParts(Random& random, const Pair& pair, int way) {
  const StridedBlock& source = pair.source.block;
  const StridedBlock& target = pair.target.block;
  std::uint64_t cuts[] = {0, Pick(random, 0, source.bytes()), Pick(random, 0, source.bytes()),
                          source.bytes()};
  std::sort(std::begin(cuts), std::end(cuts));
  CopySums sums;
  for (int i = 2; i >= 0; --i) {
    const ByteRange range = {.first = cuts[i], .count = cuts[i + 1] - cuts[i]};
    switch (way) {
      case 0:
        CopyRange(source, target, range);
        break;
      case 1:
        CopyRange(source, target, range, StoreKind::kStream);
        break;
      case 2:
        sums.source += CopyRangeDigest(source, target, range);
        break;
      case 3:
        sums.source += CopyRangeDigest(source, target, range, StoreKind::kStream);
        break;
      default: {
        const CopySums part = CopyRangeReadback(source, target, target, range);
        sums.source += part.source;
        sums.target += part.target;
      }
    }
  }
  return sums;
}

TEST(CopyRange, AgreesWithThePerByteCopyForAnyStrides) {
  Random random(11);
  for (int round = 0; round < 500; ++round) {
    SCOPED_TRACE(round);
    Pair pair = RandomPair(random, round % 10 == 0 ? 60000 : 3000);
    const std::vector<std::byte> expected = WithBytes(pair.target, BytesOf(pair.source.block));
    const DigestSum sum = SlowSum(pair.source.block);
    const int way = round % 5;
    const CopySums sums = CopyInParts(random, pair, way);
    ASSERT_EQ(pair.target.memory, expected) << "way " << way;
    if (way >= 2) {
      ASSERT_EQ(sums.source, sum) << "way " << way;
    }
    if (way >= 4) {
      ASSERT_EQ(sums.target, sum);
    }
  }
}

TEST(CopyBlock, CopiesBlocksAboveTheStreamingSize) {
  Random random(12);
  // Two columns of rows, so that runs are half a row; 24 MiB in all.
  StridedBlock box;
  box.rank = 2;
  box.item_bytes = 2;
  box.extents = {3000, 4099};
  box.stream_strides = {2 * 2 * 4099, 2};
  box.strides = {2 * 2 * 4099, 2};
  std::vector<std::byte> source(3000 * 2 * 2 * 4099);
  std::vector<std::byte> target(3000 * 2 * 4099 + 1);
  for (std::size_t i = 0; i < source.size(); i += 5) source[i] = static_cast<std::byte>(random());
  StridedBlock to = box;
  box.base = source.data();
  to.base = target.data() + 1;
  to.strides = {2 * 4099, 2};
  const auto same = [&] {
    for (std::size_t r = 0; r < 3000; ++r) {
      if (!std::equal(source.begin() + static_cast<std::ptrdiff_t>(r * 4 * 4099),
                      source.begin() + static_cast<std::ptrdiff_t>(r * 4 * 4099 + 2 * 4099),
                      target.begin() + static_cast<std::ptrdiff_t>(1 + r * 2 * 4099))) {
        return false;
      }
    }
    return true;
  };
  CopyBlock(box, to);
  EXPECT_TRUE(same());
  std::fill(target.begin(), target.end(), std::byte{});
  const DigestSum sum = CopyBlockDigest(box, to);
  EXPECT_TRUE(same());
  EXPECT_EQ(sum, DigestBlock(box));
  std::fill(target.begin(), target.end(), std::byte{});
  const CopySums sums = CopyBlockReadback(box, to);
  EXPECT_TRUE(same());
  EXPECT_EQ(sums.source, sum);
  EXPECT_EQ(sums.target, sum);
}

TEST(CopyBlockReadback, ReadsTheTargetThroughTheCheckingBlock) {
  Random random(13);
  for (int round = 0; round < 50; ++round) {
    Pair pair = RandomPair(random, 5000);
    PlacedBlock elsewhere = Place(random, pair.source.block);
    const DigestSum there = SlowSum(elsewhere.block);
    const CopySums sums = CopyRangeReadback(pair.source.block, pair.target.block, elsewhere.block,
                                            {.first = 0, .count = pair.source.block.bytes()});
    ASSERT_EQ(sums.source, SlowSum(pair.source.block));
    ASSERT_EQ(sums.target, there);
  }
}

TEST(PackRange, GivesRowMajorBytesAndUnpackPutsThemBack) {
  Random random(14);
  for (int round = 0; round < 200; ++round) {
    Pair pair = RandomPair(random, 4000);
    const std::vector<std::byte> want = BytesOf(pair.source.block);
    std::vector<std::byte> packed(want.size());
    PackRange(pair.source.block, 0, packed);
    ASSERT_EQ(packed, want);
    const std::vector<std::byte> expected = WithBytes(pair.target, want);
    if (round % 2 == 0) {
      UnpackRange(packed, 0, pair.target.block);
    } else {
      const auto cut = static_cast<std::size_t>(Pick(random, 0, packed.size()));
      UnpackRange(std::span(packed).subspan(cut), cut, pair.target.block);
      std::vector<std::byte> head(cut);
      PackRange(pair.source.block, 0, head);
      UnpackRange(head, 0, pair.target.block);
    }
    ASSERT_EQ(pair.target.memory, expected);
  }
}

TEST(RunBytes, MergesWhatLiesEndToEnd) {
  StridedBlock block;
  block.rank = 3;
  block.item_bytes = 2;
  block.extents = {4, 3, 5};
  block.strides = {30, 10, 2};
  EXPECT_EQ(RunBytes(block), 120U);
  block.strides = {32, 10, 2};
  EXPECT_EQ(RunBytes(block), 30U);
  block.strides = {48, 16, 2};
  EXPECT_EQ(RunBytes(block), 10U);
  block.strides = {2, 10, 40};
  EXPECT_EQ(RunBytes(block), 2U);
  block.extents = {4, 1, 1};
  block.strides = {2, 999, 999};
  EXPECT_EQ(RunBytes(block), 8U);
  block.extents = {4, 0, 1};
  EXPECT_EQ(RunBytes(block), 0U);
}

TEST(InstructionSet, IsOneOfTheKnown) {
  EXPECT_TRUE(InstructionSet() == "avx2" || InstructionSet() == "portable") << InstructionSet();
}

}  // namespace
}  // namespace tensorbus::kernels
