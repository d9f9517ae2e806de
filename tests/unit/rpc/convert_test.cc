#include "tensorbus/rpc/convert.h"

#include <gtest/gtest.h>

#include "tests/testing/status_matchers.h"

namespace tensorbus::rpc {
namespace {

using testing::IsStatus;

RankIdentity Engine() {
  return {.channel = "policy",
          .job = "engine",
          .role = Role::kConsumer,
          .replica = 1,
          .rank = 2,
          .rank_count = 3};
}

TEST(Convert, BringsRanksThrough) {
  ASSERT_OK_AND_ASSIGN(const RankIdentity rank, FromProto(ToProto(Engine())));
  EXPECT_EQ(rank, Engine());
}

TEST(Convert, RefusesRanksThatCannotBe) {
  const auto refuse = [](auto change) {
    proto::Rank rank = ToProto(Engine());
    change(rank);
    EXPECT_THAT(FromProto(rank), IsStatus(Code::kInvalidArgument, Reason::kMalformed))
        << rank.ShortDebugString();
  };
  refuse([](proto::Rank& rank) { rank.set_channel(""); });
  refuse([](proto::Rank& rank) { rank.set_job(std::string(257, 'x')); });
  refuse([](proto::Rank& rank) { rank.set_job("two\nlines"); });
  refuse([](proto::Rank& rank) { rank.set_job("clears\xc2\x9bK"); });
  refuse([](proto::Rank& rank) { rank.set_channel("\xe2\x80\xaeturned"); });
  refuse([](proto::Rank& rank) { rank.set_role(0); });
  refuse([](proto::Rank& rank) { rank.set_role(3); });
  refuse([](proto::Rank& rank) { rank.set_rank_count(0); });
  refuse([](proto::Rank& rank) { rank.set_rank_count(0xffffffff); });
  refuse([](proto::Rank& rank) { rank.set_rank(3); });
  refuse([](proto::Rank& rank) { rank.set_replica(0xffffffff); });
  refuse([](proto::Rank& rank) { rank.set_role(1); });  // a producer with replica 1
}

TEST(Convert, BringsBoxesThroughAndRefusesBrokenOnes) {
  const Range ranges[] = {{0, 4}, {128, 256}};
  const Box box{std::span<const Range>(ranges)};
  ASSERT_OK_AND_ASSIGN(const Box back, FromProto(ToProto(box)));
  EXPECT_EQ(back, box);
  ASSERT_OK_AND_ASSIGN(const Box scalar, FromProto(proto::BoxMessage()));
  EXPECT_EQ(scalar.volume(), 1U);

  proto::BoxMessage uneven = ToProto(box);
  uneven.add_lo(1);
  EXPECT_THAT(FromProto(uneven), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  proto::BoxMessage empty;
  empty.add_lo(4);
  empty.add_hi(4);
  EXPECT_THAT(FromProto(empty), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  proto::BoxMessage deep;
  for (int d = 0; d < kMaxDims + 1; ++d) {
    deep.add_lo(0);
    deep.add_hi(1);
  }
  EXPECT_THAT(FromProto(deep), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

}  // namespace
}  // namespace tensorbus::rpc
