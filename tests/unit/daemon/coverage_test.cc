#include "tensorbus/daemon/coverage.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/testing/status_matchers.h"

namespace tensorbus::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsStatus;

JobLayout Manifest(const std::vector<std::string>& names) {
  const std::uint64_t dims[] = {4, 2};
  JobLayout out;
  out.rank_count = 1;
  const Shape shape = Shape::Create(dims).value();
  out.holdings.push_back({.ranks = {{.rank = 0, .boxes = {Box::Whole(shape)}}}});
  for (const std::string& name : names) {
    out.tensors.push_back({.spec = {.name = name, .dtype = DType::kBf16, .shape = shape}});
  }
  return out;
}

TEST(Coverage, FindsNamesThatAreNearest) {
  const JobLayout manifest =
      Manifest({"model.layers.0.q_proj", "model.layers.0.k_proj", "lm_head"});
  EXPECT_THAT(NearestNames(manifest, "layers.0.q_proj", 1), ElementsAre("model.layers.0.q_proj"));
  EXPECT_THAT(NearestNames(manifest, "lm_haed", 3), ElementsAre("lm_head"));
  EXPECT_THAT(NearestNames(manifest, "something_else_entirely", 3), ElementsAre());
}

Status Fits(const JobLayout& manifest, const JobLayout& replica,
            const std::vector<std::string>& leave_out = {}) {
  std::vector<RankClaim> ranks(replica.rank_count, RankClaim{.who = "", .leave_out = {}});
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i].who = fmt::format("rank {}", i);
  ranks[0].leave_out = leave_out;
  return CheckReplicaFits(TensorIndex(manifest), replica, ranks, "policy/engine replica 0");
}

TEST(Coverage, CountsTensorsWithoutAnyBoxAsMissing) {
  const JobLayout manifest = Manifest({"a", "b"});
  JobLayout replica = Manifest({"a", "b"});
  replica.holdings.push_back({});
  replica.tensors[1].holding = 1;
  const Status status = Fits(manifest, replica);
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kLayoutMismatch));
  EXPECT_THAT(status.message(), HasSubstr("leave_out"));
  EXPECT_OK(Fits(manifest, replica, {"b"}));
}

TEST(Coverage, RefusesToLeaveOutWhatIsNotThere) {
  const JobLayout manifest = Manifest({"lm_head"});
  EXPECT_THAT(CheckRankFits(TensorIndex(manifest), RankLayout(), {"rank", {"lm_haed"}}),
              IsStatus(Code::kFailedPrecondition, Reason::kUnknownTensor));
  EXPECT_THAT(Fits(manifest, manifest, {"lm_haed"}),
              IsStatus(Code::kFailedPrecondition, Reason::kUnknownTensor));
}

Box Cut(Range rows, Range columns) {
  const Range ranges[] = {rows, columns};
  return Box(std::span<const Range>(ranges));
}

/// "a" [4, 2], of which rank i holds boxes[i].
JobLayout HeldAs(const std::vector<std::vector<Box>>& boxes) {
  JobLayout out = Manifest({"a"});
  out.rank_count = static_cast<std::uint32_t>(boxes.size());
  out.holdings[0].ranks.clear();
  for (std::uint32_t rank = 0; rank < out.rank_count; ++rank) {
    if (!boxes[rank].empty()) out.holdings[0].ranks.push_back({rank, boxes[rank]});
  }
  return out;
}

TEST(Coverage, NamesRankTensorAndBoxOfWhatIsHeldInPart) {
  const JobLayout manifest = Manifest({"a"});
  const JobLayout replica =
      HeldAs({{Cut({0, 2}, {0, 2})}, {Cut({2, 3}, {0, 2}), Cut({3, 4}, {1, 2})}});
  const Status status = Fits(manifest, replica);
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kLayoutMismatch));
  for (const char* part : {"policy/engine replica 0", "\"a\"", "[3:4, 0:1]",
                           "rank 0 holds [0:2, 0:2]", "rank 1 holds", "leave_out"}) {
    EXPECT_THAT(status.message(), HasSubstr(part));
  }
  EXPECT_OK(Fits(manifest, replica, {"a"})) << "a part on purpose";
}

TEST(Coverage, LetsRanksOverlapAsLongAsTheyHoldEverythingTogether) {
  const JobLayout manifest = Manifest({"a"});
  EXPECT_OK(Fits(manifest, HeldAs({{Cut({0, 3}, {0, 2})}, {Cut({1, 4}, {0, 2})}})));
  EXPECT_OK(Fits(manifest, HeldAs({{Cut({0, 4}, {0, 2})}, {}, {Cut({0, 4}, {0, 2})}})));
  EXPECT_OK(Fits(manifest, HeldAs({{Cut({0, 4}, {0, 1})}, {Cut({0, 4}, {1, 2})}})));
  const Status hole = Fits(manifest, HeldAs({{Cut({0, 2}, {0, 2})}, {Cut({3, 4}, {0, 2})}}));
  EXPECT_THAT(hole.message(), HasSubstr("[2:3, 0:2]"));
}

TEST(Coverage, AnEmptyTensorNeedsNothing) {
  JobLayout manifest = Manifest({"a", "none"});
  const std::uint64_t empty[] = {0, 2};
  manifest.tensors[1].spec.shape = Shape::Create(empty).value();
  manifest.tensors[1].holding = 1;
  manifest.holdings.push_back({});  // nobody holds a box of it
  EXPECT_OK(Fits(manifest, manifest)) << "registered";
  JobLayout without = manifest;
  without.tensors.pop_back();
  EXPECT_OK(Fits(manifest, without)) << "or not";
}

TEST(Coverage, LooksAtEveryShapeThatSharesAHolding) {
  JobLayout manifest = Manifest({"a", "b"});
  const std::uint64_t longer[] = {6, 2};
  manifest.tensors[1].spec.shape = Shape::Create(longer).value();
  JobLayout replica = manifest;  // both held as [0:4, 0:2]
  const Status status = Fits(manifest, replica);
  EXPECT_THAT(status.message(), HasSubstr("\"b\""));
  EXPECT_THAT(status.message(), HasSubstr("[4:6, 0:2]"));
}

}  // namespace
}  // namespace tensorbus::daemon
