#include "worker_shim/bucket_service.h"

#include <array>
#include <gtest/gtest.h>
#include <numeric>

#include "tests/testing/status_matchers.h"

namespace tensorbus::worker_shim {
namespace {

using tensorbus::testing::IsStatus;

/// A 4 x 6 u8 tensor of which this rank holds columns 2 to 4, transposed in memory.
class Buckets : public ::testing::Test {
 protected:
  void SetUp() override {
    std::iota(memory_.begin(), memory_.end(), 0);
    const std::array<std::uint64_t, 2> dims = {4, 6};
    registration_.tensors = {{"t", DType::kU8, Shape::Create(dims).value()}};
    registration_.segment_bytes = {memory_.size()};
    Piece piece;
    const std::array<Range, 2> ranges = {Range{0, 4}, Range{2, 4}};
    piece.box = Box(ranges);
    piece.offset = 3;
    piece.strides = {1, 4};
    registration_.pieces = {piece};
    service_.SetMemory(registration_, {reinterpret_cast<std::byte*>(memory_.data())});
    ASSERT_OK_AND_ASSIGN(UniqueFd fd, CreateMemfd("bucket", 4096));
    ASSERT_OK_AND_ASSIGN(bucket_, Mapping::Create(fd.get(), 4096, Mapping::Access::kReadWrite));
    ASSERT_OK(service_.Attach({.bucket = 1, .bytes = 4096}, std::move(fd)));
  }

  static Box BoxOf(Range rows, Range columns) {
    const std::array<Range, 2> ranges = {rows, columns};
    return Box(ranges);
  }
  static wire::BucketRange Whole() {
    wire::BucketRange range;
    range.bucket = 1;
    range.box = BoxOf({0, 4}, {2, 4});
    range.bytes = 8;
    return range;
  }

  std::array<std::uint8_t, 16> memory_ = {};
  Registration registration_;
  BucketService service_;
  Mapping bucket_;
};

TEST_F(Buckets, PacksAStretchOfTheBoxInRowMajorOrder) {
  wire::BucketRange range = Whole();
  range.first = 1;
  range.bytes = 4;
  range.bucket_offset = 10;
  ASSERT_OK(service_.Pack({{range}}));
  // Row-major over the box: (r, c) lies at 3 + r + 4 c.
  const std::array<std::uint8_t, 4> expected = {7, 4, 8, 5};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(std::to_integer<int>(bucket_.data()[10 + i]), expected[i]);
  }
}

TEST_F(Buckets, PacksAPartOfAPiece) {
  wire::BucketRange range = Whole();
  range.box = BoxOf({1, 3}, {3, 4});
  range.bytes = 2;
  ASSERT_OK(service_.Pack({{range}}));
  EXPECT_EQ(std::to_integer<int>(bucket_.data()[0]), 3 + 1 + 4);
  EXPECT_EQ(std::to_integer<int>(bucket_.data()[1]), 3 + 2 + 4);
}

TEST_F(Buckets, UnpacksWhatItPacked) {
  ASSERT_OK(service_.Pack({{Whole()}}));
  const auto before = memory_;
  memory_.fill(99);
  ASSERT_OK(service_.Unpack({{Whole()}}));
  for (std::size_t i = 3; i < 11; ++i) EXPECT_EQ(memory_[i], before[i]);
  EXPECT_EQ(memory_[2], 99) << "written outside the piece";
  EXPECT_EQ(memory_[11], 99);
}

TEST_F(Buckets, RefusesNumbersOutOfBoundsBeforeTheFirstByte) {
  std::vector<wire::BucketRange> bad(10, Whole());
  bad[0].piece = 1;
  bad[1].bucket = 2;
  bad[2].bytes = 9;
  bad[3].first = 9;
  bad[3].bytes = 0;
  bad[4].first = ~std::uint64_t{0};
  bad[5].bucket_offset = 4089;
  bad[6].bucket_offset = ~std::uint64_t{0};
  bad[7].box = BoxOf({0, 4}, {1, 4});
  bad[8].box = BoxOf({3, 1}, {2, 4});
  bad[9].box = Box();
  for (const wire::BucketRange& range : bad) {
    EXPECT_THAT(service_.Unpack({{Whole(), range}}),
                IsStatus(Code::kInvalidArgument, Reason::kMalformed));
    EXPECT_THAT(service_.Pack({{Whole(), range}}),
                IsStatus(Code::kInvalidArgument, Reason::kMalformed));
    EXPECT_EQ(std::to_integer<int>(bucket_.data()[0]), 0) << "a byte moved";
  }
}

TEST_F(Buckets, RefusesABucketShorterThanAnnounced) {
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, CreateMemfd("bucket", 4096));
  EXPECT_THAT(service_.Attach({.bucket = 2, .bytes = 8192}, std::move(fd)),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(service_.Attach({.bucket = BucketService::kBucketsMax, .bytes = 1}, UniqueFd()),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(Buckets, ForgetsBucketsOfALostAgent) {
  service_.DropBuckets();
  EXPECT_THAT(service_.Pack({{Whole()}}), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(Buckets, RefusesWhatWasOrderedForAnOlderRegistration) {
  service_.SetMemory(registration_, {reinterpret_cast<std::byte*>(memory_.data())});
  const wire::BucketRange range{
      .piece = 0, .bucket = 1, .box = registration_.pieces[0].box, .first = 0, .bytes = 1};
  EXPECT_THAT(service_.Unpack({{range}}), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

}  // namespace
}  // namespace tensorbus::worker_shim
