#include "tensorbus/transport/stream_map.h"

#include <gtest/gtest.h>

#include "tests/testing/random_blocks.h"

namespace tensorbus::transport {
namespace {

using testing::Pick;
using testing::Random;

TEST(StreamMap, CursorAndPartsGiveTheStreamFromAnywhere) {
  Random random(61);
  for (int round = 0; round < 40; ++round) {
    std::vector<testing::PlacedBlock> placed;
    std::vector<StridedBlock> blocks;
    std::vector<std::byte> stream;
    for (std::uint64_t i = 0; i < Pick(random, 1, 9); ++i) {
      StridedBlock box = testing::RandomBox(random, 600);
      if (box.rank != 0 && Pick(random, 0, 4) == 0) box.extents[0] = 0;
      placed.push_back(testing::Place(random, box));
      blocks.push_back(placed.back().block);
      const auto bytes = testing::BytesOf(placed.back().block);
      stream.insert(stream.end(), bytes.begin(), bytes.end());
    }
    const StreamMap map(blocks);
    ASSERT_EQ(map.bytes(), stream.size());
    if (stream.empty()) continue;
    const std::uint64_t first = Pick(random, 0, stream.size() - 1);
    const std::uint64_t count = Pick(random, 0, stream.size() - first);
    StreamCursor cursor(map, blocks, first);
    std::uint64_t runs = 0;
    for (std::uint64_t at = first; at < first + count; ++runs) {
      const auto run = cursor.Next(std::min(first + count - at, Pick(random, 1, 500)));
      ASSERT_TRUE(
          std::equal(run.begin(), run.end(), stream.begin() + static_cast<std::ptrdiff_t>(at)));
      at += run.size();
      ASSERT_EQ(cursor.at(), at);
    }
    std::uint64_t in_parts = 0;
    map.ForEachPart(first, count, [&](const BlockPart& part) {
      ASSERT_LE(part.range.first + part.range.count, blocks[part.block].bytes());
      in_parts += part.range.count;
    });
    EXPECT_EQ(in_parts, count);
    EXPECT_LE(map.RunCount(first, count), runs + 1);
  }
}

TEST(StreamMap, WindowsEndWhereTheyTouchTooManyBlocks) {
  StridedBlock block;
  block.rank = 1;
  block.extents[0] = 10;
  block.strides[0] = 1;
  const std::vector<StridedBlock> blocks(5, block);
  const StreamMap map(blocks);
  EXPECT_EQ(map.Window(0, 100, 2), 20U);
  EXPECT_EQ(map.Window(5, 100, 2), 15U);
  EXPECT_EQ(map.Window(5, 7, 2), 7U);
  EXPECT_EQ(map.Window(35, 100, 9), 15U);
  EXPECT_EQ(map.Window(50, 100, 9), 0U);
  EXPECT_EQ(map.BlockAt(10), 1U);
}

}  // namespace
}  // namespace tensorbus::transport
