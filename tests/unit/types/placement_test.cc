#include "tensorbus/types/placement.h"

#include <numeric>

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;
using Indices = std::vector<std::uint64_t>;

/// torch.chunk on a list of indices.
Indices Chunk(const Indices& list, std::uint64_t parts, std::uint64_t index) {
  const std::uint64_t size = (list.size() + parts - 1) / parts;
  Indices out;
  for (std::uint64_t i = index * size; i < std::min((index + 1) * size, list.size()); ++i)
    out.push_back(list[i]);
  return out;
}

Indices Keep(const Placement& placement, const Indices& list, std::uint64_t size,
             std::uint64_t coordinate) {
  if (placement.kind == Placement::Kind::kShard) return Chunk(list, size, coordinate);
  Indices out;
  for (std::uint64_t c = 0; c < placement.split_factor; ++c) {
    for (const std::uint64_t i : Chunk(Chunk(list, placement.split_factor, c), size, coordinate))
      out.push_back(i);
  }
  return out;
}

Indices Expand(std::span<const Box> boxes) {
  Indices out;
  for (const Box& box : boxes) {
    for (std::uint64_t i = box[0].lo; i < box[0].hi; ++i) out.push_back(i);
  }
  return out;
}

DeviceMesh Mesh(std::vector<std::uint32_t> sizes) {
  DeviceMesh mesh;
  for (const std::uint32_t size : sizes) mesh.axes.push_back({"m", size});
  return mesh;
}

TEST(Placement, ReadsWhatDTensorPrints) {
  EXPECT_EQ(ParsePlacement("Replicate").value(), Placement());
  EXPECT_EQ(ParsePlacement("Replicate()").value(), Placement());
  EXPECT_EQ(ParsePlacement("Shard(-1)").value(), (Placement{Placement::Kind::kShard, -1, 1}));
  EXPECT_EQ(ParsePlacement("Shard(dim=2)").value(), (Placement{Placement::Kind::kShard, 2, 1}));
  EXPECT_EQ(ParsePlacement("_StridedShard(0, split_factor=4)").value(),
            (Placement{Placement::Kind::kStridedShard, 0, 4}));
  EXPECT_EQ(ParsePlacement("_StridedShard(dim=0, split_factor=4)").value().ToString(),
            "_StridedShard(0, split_factor=4)");
  EXPECT_EQ(ParsePlacement("Partial(sum)").value().kind, Placement::Kind::kPartial);
  for (const char* bad : {"", "Shard", "Shard()", "Shard(0", "Shard(0) ", "Shard(99999999999)",
                          "_StridedShard(0)", "_StridedShard(0, split_factor=0)", "replicate"}) {
    EXPECT_THAT(ParsePlacement(bad), IsStatus(Code::kInvalidArgument, Reason::kMalformed)) << bad;
  }
}

TEST(Placement, OneDimensionAgreesWithIndexLists) {
  const std::vector<Placement> kinds = {{Placement::Kind::kReplicate, 0, 1},
                                        {Placement::Kind::kShard, 0, 1},
                                        {Placement::Kind::kStridedShard, 0, 2},
                                        {Placement::Kind::kStridedShard, -1, 3}};
  for (std::uint64_t n = 0; n <= 13; ++n) {
    for (std::uint32_t a = 1; a <= 4; ++a) {
      for (std::uint32_t b = 1; b <= 3; ++b) {
        for (const Placement& first : kinds) {
          for (const Placement& second : kinds) {
            Indices all(n);
            std::iota(all.begin(), all.end(), 0);
            for (std::uint32_t rank = 0; rank < a * b; ++rank) {
              Indices want = all;
              if (first.kind != Placement::Kind::kReplicate) want = Keep(first, want, a, rank / b);
              if (second.kind != Placement::Kind::kReplicate)
                want = Keep(second, want, b, rank % b);
              const std::vector<std::uint64_t> dims = {n};
              const std::vector<std::uint32_t> at = {rank / b, rank % b};
              const std::vector<Placement> placements = {first, second};
              ASSERT_OK_AND_ASSIGN(const auto boxes, BoxesAt(Mesh({a, b}), placements,
                                                             Shape::Create(dims).value(), at));
              ASSERT_EQ(Expand(boxes), want) << n << " over " << a << "x" << b;
              for (std::size_t i = 1; i < boxes.size(); ++i)
                ASSERT_LT(boxes[i - 1][0].hi, boxes[i][0].lo) << "adjacent boxes are merged";
            }
          }
        }
      }
    }
  }
}

TEST(Placement, FsdpOverTpNeedsTheOrderOfTheSplits) {
  // n = 7 over TP 2 and FSDP 3: the smallest size where the orders differ.
  const std::vector<std::uint64_t> dims = {7};
  const std::vector<Placement> placements = {{Placement::Kind::kStridedShard, 0, 2},
                                             {Placement::Kind::kShard, 0, 1}};
  ASSERT_OK_AND_ASSIGN(const Holding holding,
                       Resolve(Mesh({3, 2}), placements, Shape::Create(dims).value(), 6));
  Indices all;
  for (const RankBoxes& held : holding.ranks) {
    for (const std::uint64_t i : Expand(held.boxes)) all.push_back(i);
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, (Indices{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Placement, RankIdsPermuteAndLeaveOut) {
  DeviceMesh mesh = Mesh({2});
  mesh.rank_ids = {3, 1};
  const std::vector<std::uint64_t> dims = {4};
  const std::vector<Placement> placements = {{Placement::Kind::kShard, 0, 1}};
  ASSERT_OK_AND_ASSIGN(const Holding holding,
                       Resolve(mesh, placements, Shape::Create(dims).value(), 4));
  ASSERT_EQ(holding.ranks.size(), 2U);
  EXPECT_EQ(holding.ranks[0].rank, 1U);
  EXPECT_EQ(holding.ranks[0].boxes[0][0], (Range{2, 4}));
}

TEST(Placement, RefusesEachFaultByName) {
  const std::vector<std::uint64_t> dims = {4};
  const Shape shape = Shape::Create(dims).value();
  const auto resolve = [&](DeviceMesh mesh, std::vector<Placement> placements) {
    return Resolve(mesh, placements, shape, 4).status();
  };
  const Placement shard = {Placement::Kind::kShard, 0, 1};
  EXPECT_OK(resolve(Mesh({4}), {shard}));
  EXPECT_THAT(resolve(Mesh({4}), {}).message(), HasSubstr("placements: 0 for a mesh of 1"));
  EXPECT_THAT(resolve(Mesh({4}), {{Placement::Kind::kShard, 1, 1}}).message(),
              HasSubstr("Shard(1)"));
  EXPECT_THAT(resolve(Mesh({4}), {{Placement::Kind::kShard, -2, 1}}).message(),
              HasSubstr("Shard(-2)"));
  EXPECT_THAT(resolve(Mesh({5}), {shard}).message(), HasSubstr("mesh: 5 ranks"));
  EXPECT_THAT(resolve(Mesh({0}), {shard}).message(), HasSubstr("size 0"));
  EXPECT_THAT(resolve(Mesh({65536, 65536}), {shard, shard}).message(), HasSubstr("more than"));
  const Status partial = resolve(Mesh({4}), {{Placement::Kind::kPartial, 0, 1}});
  EXPECT_THAT(partial, IsStatus(Code::kInvalidArgument, Reason::kUnsupported));
  EXPECT_THAT(partial.message(), HasSubstr("summand"));
  DeviceMesh mesh = Mesh({2});
  mesh.rank_ids = {1, 1};
  EXPECT_THAT(resolve(mesh, {shard}).message(), HasSubstr("1 appears twice"));
  mesh.rank_ids = {1, 4};
  EXPECT_THAT(resolve(mesh, {shard}).message(), HasSubstr("rank_ids: 4"));
  mesh.rank_ids = {1};
  EXPECT_THAT(resolve(mesh, {shard}).message(), HasSubstr("rank_ids: 1 ids"));
}

TEST(Placement, AsksForTooMuchAreRefusedQuickly) {
  const std::vector<std::uint64_t> dims = {std::uint64_t{1} << 50};
  const Shape shape = Shape::Create(dims).value();
  const std::vector<Placement> hostile = {
      {Placement::Kind::kStridedShard, 0, std::uint64_t{1} << 40}};
  EXPECT_THAT(Resolve(Mesh({60000}), hostile, shape, 65536),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(Resolve(Mesh({2}), hostile, shape, 2),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

}  // namespace
}  // namespace tensorbus
