#include "tensorbus/daemon/coverage.h"

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
  std::vector<RankClaim> ranks(replica.rank_count, RankClaim{.who = "rank", .leave_out = {}});
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i].who += " " + std::to_string(i);
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

}  // namespace
}  // namespace tensorbus::daemon
