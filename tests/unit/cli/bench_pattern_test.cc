#include "tensorbus/cli/bench_pattern.h"

#include <array>
#include <gtest/gtest.h>
#include <map>
#include <vector>

#include "tensorbus/types/placement.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::cli {
namespace {

using testing::IsStatus;

constexpr Placement kShard0 = {.kind = Placement::Kind::kShard, .dim = 0};
constexpr Placement kShard1 = {.kind = Placement::Kind::kShard, .dim = 1};

/// One tensor cut over `ranks` ranks.
JobLayout Cut(DType dtype, std::vector<std::uint64_t> dims, const Placement& placement,
              std::uint32_t ranks) {
  JobLayout layout;
  layout.rank_count = ranks;
  JobLayout::Tensor tensor;
  tensor.spec = {"weight", dtype, Shape::Create(dims).value()};
  const DeviceMesh mesh = {.axes = {{"ranks", ranks}}, .rank_ids = {}};
  const std::array<Placement, 1> placements = {placement};
  layout.holdings.push_back(Resolve(mesh, placements, tensor.spec.shape, ranks).value());
  layout.tensors.push_back(tensor);
  return layout;
}

class BenchPattern : public ::testing::TestWithParam<DType> {};

TEST_P(BenchPattern, EveryRankFindsWhatItWrote) {
  for (const Placement& placement : {kShard0, kShard1}) {
    const JobLayout layout = Cut(GetParam(), {7, 5, 37}, placement, 3);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      const RankArena arena = PlaceRank(layout, rank);
      std::vector<std::byte> memory(arena.bytes);
      FillArena(layout, arena, 4, memory.data());
      EXPECT_OK(CheckArena(layout, arena, 4, memory.data()));
      EXPECT_THAT(CheckArena(layout, arena, 5, memory.data()),
                  IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
    }
  }
}

// The value of an element depends on its place in the tensor alone, not on how that is cut.
TEST_P(BenchPattern, DoesNotDependOnTheCut) {
  const DType dtype = GetParam();
  const std::uint32_t item = ItemBytes(dtype);
  const JobLayout whole = Cut(dtype, {6, 40}, kShard0, 1);
  const RankArena all = PlaceRank(whole, 0);
  std::vector<std::byte> expected(all.bytes);
  FillArena(whole, all, 9, expected.data());
  const JobLayout cut = Cut(dtype, {6, 40}, kShard1, 2);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const RankArena arena = PlaceRank(cut, rank);
    std::vector<std::byte> memory(arena.bytes);
    FillArena(cut, arena, 9, memory.data());
    for (std::uint64_t row = 0; row < 6; ++row) {
      EXPECT_EQ(
          std::vector<std::byte>(
              memory.begin() + static_cast<std::ptrdiff_t>(row * 20 * item),
              memory.begin() + static_cast<std::ptrdiff_t>((row + 1) * 20 * item)),
          std::vector<std::byte>(
              expected.begin() + static_cast<std::ptrdiff_t>((row * 40 + rank * 20) * item),
              expected.begin() + static_cast<std::ptrdiff_t>((row * 40 + rank * 20 + 20) * item)));
    }
  }
}

TEST_P(BenchPattern, NamesTheElementThatDiffers) {
  const JobLayout layout = Cut(GetParam(), {8, 21}, kShard1, 1);
  const std::uint32_t item = ItemBytes(GetParam());
  const RankArena arena = PlaceRank(layout, 0);
  std::vector<std::byte> memory(arena.bytes);
  FillArena(layout, arena, 1, memory.data());
  memory[std::size_t{100} * item] ^= std::byte{1};
  const Status status = CheckArena(layout, arena, 1, memory.data());
  EXPECT_THAT(status, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_NE(status.message().find("'weight' element 100 "), std::string::npos) << status;
}

INSTANTIATE_TEST_SUITE_P(ItemSizes, BenchPattern,
                         ::testing::Values(DType::kF64, DType::kF32, DType::kBf16, DType::kU8));

TEST(BenchPatternKey, DiffersByTensorAndVersion) {
  EXPECT_NE(PatternKey(1, "a"), PatternKey(2, "a"));
  EXPECT_NE(PatternKey(1, "a"), PatternKey(1, "b"));
  // What bench/peers/torch_peer.py computes too.
  EXPECT_EQ(PatternKey(3, "model.norm.weight"), 0x3454EA7EU);
}

TEST(BenchPlaceRank, PiecesDoNotOverlapAndAreAligned) {
  JobLayout layout = Cut(DType::kBf16, {3, 5}, kShard0, 2);
  layout.tensors.push_back(layout.tensors[0]);
  layout.tensors[1].spec.name = "other";
  const RankArena arena = PlaceRank(layout, 0);
  ASSERT_EQ(arena.pieces.size(), 2U);
  EXPECT_EQ(arena.pieces[0].offset, 0U);
  EXPECT_EQ(arena.pieces[1].offset, 64U);
  EXPECT_EQ(arena.bytes, 4096U);
}

}  // namespace
}  // namespace tensorbus::cli
