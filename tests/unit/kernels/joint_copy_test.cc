#include "tensorbus/kernels/joint_copy.h"

#include <algorithm>
#include <gtest/gtest.h>
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

/// Several targets of one source, each with what its memory must be in the end.
struct Scene {
  PlacedBlock source;
  std::vector<StridedBlock> parts;  ///< of the source, one per target
  std::vector<PlacedBlock> targets;
  std::vector<std::vector<std::byte>> expected;

  void AddTarget(Random& random, const StridedBlock& part) {
    StridedBlock box = part;
    box.base = nullptr;
    parts.push_back(part);
    targets.push_back(Place(random, box));
    expected.push_back(WithBytes(targets.back(), BytesOf(part)));
  }
};

/// A part of the block: one stretch of one dimension, or all of it.
StridedBlock PartOf(Random& random, StridedBlock block) {
  if (block.rank == 0 || Pick(random, 0, 3) == 0) return block;
  const auto d = static_cast<std::size_t>(Pick(random, 0, block.rank - std::uint64_t{1}));
  const std::uint64_t lo = Pick(random, 0, block.extents[d] - 1);
  block.base += lo * block.strides[d];
  block.stream_offset += lo * block.stream_strides[d];
  block.extents[d] = Pick(random, 1, block.extents[d] - lo);
  return block;
}

Scene RandomScene(Random& random, std::uint64_t bytes_max) {
  Scene scene;
  scene.source = Place(random, RandomBox(random, bytes_max));
  const std::uint64_t count = Pick(random, 1, kJointMax);
  for (std::uint64_t i = 0; i < count; ++i) {
    scene.AddTarget(random, PartOf(random, scene.source.block));
  }
  return scene;
}

/// Rows of which every target takes some columns: what a change of the sharded dimension is.
Scene Columns(Random& random, std::uint64_t rows, std::uint64_t run_bytes, std::size_t targets) {
  StridedBlock box;
  box.rank = 2;
  box.item_bytes = 2;
  box.extents = {rows, run_bytes / 2 * targets};
  box.strides = box.stream_strides = {run_bytes * targets, 2};
  box.stream_offset = Pick(random, 0, 3) * 2;
  box.key = {.a = random(), .b = random()};
  Scene scene;
  scene.source = Place(random, box);
  for (std::size_t i = 0; i < targets; ++i) {
    StridedBlock part = scene.source.block;
    part.extents[1] = run_bytes / 2;
    part.base += i * run_bytes / 2 * part.strides[1];
    part.stream_offset += i * run_bytes;
    scene.AddTarget(random, part);
  }
  return scene;
}

/// Copies everything in one or two calls, cut anywhere, and compares bytes and sums.
void ExpectCopied(Random& random, Scene& scene, int way) {
  const std::size_t count = scene.parts.size();
  std::vector<JointCopy> copies(count);
  std::vector<CopySums> sums(count);
  std::vector<std::uint64_t> cuts;
  for (const StridedBlock& part : scene.parts) cuts.push_back(Pick(random, 0, part.bytes()));
  for (const bool second : {true, false}) {
    for (std::size_t i = 0; i < count; ++i) {
      copies[i] = {.source = &scene.parts[i],
                   .target = &scene.targets[i].block,
                   .check = &scene.targets[i].block,
                   .range = {.first = second ? cuts[i] : 0,
                             .count = second ? scene.parts[i].bytes() - cuts[i] : cuts[i]},
                   .sums = {.source = {1, 1, 1}, .target = {1, 1, 1}}};
    }
    switch (way) {
      case 0:
        CopyJoint(copies);
        break;
      case 1:
        CopyJoint(copies, StoreKind::kStream);
        break;
      case 2:
        CopyJointDigest(copies);
        break;
      case 3:
        CopyJointDigest(copies, StoreKind::kStream);
        break;
      default:
        CopyJointReadback(copies);
    }
    for (std::size_t i = 0; i < count; ++i) {
      sums[i].source += copies[i].sums.source;
      sums[i].target += copies[i].sums.target;
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    SCOPED_TRACE(i);
    const DigestSum want = SlowSum(scene.parts[i]);
    ASSERT_EQ(scene.targets[i].memory, scene.expected[i]) << "way " << way;
    if (way >= 2) {
      ASSERT_EQ(sums[i].source, want) << "way " << way;
    } else {
      ASSERT_EQ(sums[i].source.bytes, want.bytes);
    }
    if (way >= 4) {
      ASSERT_EQ(sums[i].target, want);
    }
  }
}

TEST(CopyJoint, AgreesWithThePerByteCopyForAnyParts) {
  Random random(21);
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE(round);
    Scene scene = RandomScene(random, round % 10 == 0 ? 60000 : 3000);
    ExpectCopied(random, scene, round % 5);
  }
}

TEST(CopyJoint, SharesRowsAmongTargetsAtEveryRunLength) {
  Random random(22);
  for (const std::uint64_t run_bytes : {64, 66, 128, 256, 510, 512, 1000, 4096, 9000}) {
    for (const std::size_t targets : {1, 2, 3}) {
      SCOPED_TRACE(run_bytes);
      for (int way = 0; way < 5; ++way) {
        Scene scene = Columns(random, 41, run_bytes, targets);
        ExpectCopied(random, scene, way);
      }
    }
  }
}

TEST(CopyJoint, FeedsReplicasFromOnePass) {
  Random random(23);
  for (int way = 0; way < 5; ++way) {
    Scene scene = Columns(random, 50, 3000, 1);
    const StridedBlock whole = scene.parts.front();
    scene.AddTarget(random, whole);
    scene.AddTarget(random, whole);
    ExpectCopied(random, scene, way);
  }
}

TEST(CopyJointReadback, ReadsEachTargetThroughItsOwnCheckingBlock) {
  Random random(24);
  Scene scene = Columns(random, 30, 700, 2);
  PlacedBlock elsewhere = Place(random, scene.parts[1]);
  const DigestSum there = SlowSum(elsewhere.block);
  std::vector<JointCopy> copies(2);
  for (std::size_t i = 0; i < 2; ++i) {
    copies[i] = {.source = &scene.parts[i],
                 .target = &scene.targets[i].block,
                 .check = i == 1 ? &elsewhere.block : &scene.targets[i].block,
                 .range = {.first = 0, .count = scene.parts[i].bytes()},
                 .sums = {}};
  }
  CopyJointReadback(copies);
  EXPECT_EQ(copies[0].sums.target, SlowSum(scene.parts[0]));
  EXPECT_EQ(copies[1].sums.source, SlowSum(scene.parts[1]));
  EXPECT_EQ(copies[1].sums.target, there);
}

}  // namespace
}  // namespace tensorbus::kernels
