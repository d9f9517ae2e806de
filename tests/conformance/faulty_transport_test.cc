// Every fault a FaultyTransport can make, on every transport: which proof refuses it.

#include "tensorbus/transport/faulty_transport.h"

#include <chrono>
#include <gtest/gtest.h>
#include <string>

#include "tensorbus/transport/route_check.h"
#include "tests/conformance/routes.h"
#include "tests/conformance/worlds.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::transport {
namespace {

using testing::IsStatus;
using testing::Random;
using FaultKind = Fault::Kind;

struct Inner {
  const char* name;
  std::unique_ptr<World> (*make)(WorldOptions);
};

const RouteKey kKey = {.session = SessionId{5}, .source_rank = 0, .target_rank = 1};

/// Four blocks of [16, 200] bytes; the target lies with gaps between the rows.
TestRoute MatrixRoute(Random& random) {
  TestRoute route;
  for (int i = 0; i < 4; ++i) {
    StridedBlock box;
    box.rank = 2;
    box.item_bytes = 2;
    box.extents = {16, 100};
    box.stream_strides = {200, 2};
    box.key = {.a = random(), .b = random()};
    for (auto* side : {&route.sources, &route.targets}) {
      const std::uint64_t pitch = side == &route.sources ? 200 : 240;
      testing::PlacedBlock placed = {std::vector<std::byte>(16 * pitch), box};
      testing::FillRandom(random, placed.memory);
      placed.block.base = placed.memory.data();
      placed.block.strides = {pitch, 2};
      side->push_back(std::move(placed));
    }
  }
  return route;
}

class FaultyTransportTest : public ::testing::TestWithParam<Inner> {
 protected:
  void Start(std::vector<Fault> faults) {
    world_ = MakeFaultyWorld(GetParam().make, std::move(faults));
    ASSERT_OK(world_->source().Expose(kKey, route_.source()));
  }
  Result<PullResult> Pull(Proof proof) {
    return PullAndWait(world_->target(), kKey, route_.target(), Unhurried(world_->peer(), proof));
  }
  /// Whether `proof` lets the fault pass.
  Result<PullResult> PullWith(Fault fault, Proof proof) {
    Start({std::move(fault)});
    // What an earlier pull left there would hide a block that does not come.
    for (auto& placed : route_.targets) testing::FillRandom(random_, placed.memory);
    return Pull(proof);
  }

  Random random_{41};
  TestRoute route_ = MatrixRoute(random_);
  std::unique_ptr<World> world_;
};

TEST_P(FaultyTransportTest, DamageAfterLandingPassesStreamAndIsRefusedByReadback) {
  const Fault faults[] = {
      {.kind = FaultKind::kFlipBit, .block = 2, .byte = 3199},
      {.kind = FaultKind::kDropBlock, .block = 2},
      {.kind = FaultKind::kRepeatBlock, .block = 1, .other = 2},
      {.kind = FaultKind::kShiftRow, .block = 2},
  };
  for (const Fault& fault : faults) {
    SCOPED_TRACE(static_cast<int>(fault.kind));
    EXPECT_OK(PullWith(fault, Proof::kStream));
    for (const Proof proof : {Proof::kReadback, Proof::kMemory}) {
      const auto refused = PullWith(fault, proof);
      EXPECT_THAT(refused, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
      EXPECT_NE(refused.status().message().find("session 5 route 0 -> 1 block 2"),
                std::string::npos)
          << refused.status();
    }
    // The next pull of the same plan is sound.
    route_.Expect();
    EXPECT_OK(Pull(Proof::kReadback));
    EXPECT_TRUE(route_.Arrived());
  }
}

TEST_P(FaultyTransportTest, SwappedBlocksOfEqualShapeAreRefusedByReadback) {
  const Fault swap = {.kind = FaultKind::kSwapBlocks, .block = 1, .other = 3};
  EXPECT_OK(PullWith(swap, Proof::kStream));
  EXPECT_THAT(PullWith(swap, Proof::kReadback),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
}

TEST_P(FaultyTransportTest, DroppedZerosAreRefusedByReadback) {
  for (auto& placed : route_.sources) {
    std::fill(placed.memory.begin(), placed.memory.end(), std::byte{});
  }
  EXPECT_THAT(PullWith({.kind = FaultKind::kDropBlock, .block = 0}, Proof::kReadback),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
}

TEST_P(FaultyTransportTest, AnEarlyAcknowledgementIsRefusedByReadback) {
  const Fault early = {.kind = FaultKind::kAckEarly};
  EXPECT_OK(PullWith(early, Proof::kStream));
  EXPECT_THAT(PullWith(early, Proof::kReadback),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
}

TEST_P(FaultyTransportTest, LostReceiptsAreSeenByTheCaller) {
  const auto result = PullWith({.kind = FaultKind::kLoseReceipts}, Proof::kReadback);
  ASSERT_OK(result);
  EXPECT_THAT(CheckResult(kKey, route_.target(), *result, Proof::kReadback),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  ASSERT_OK_AND_ASSIGN(const PullResult sound, Pull(Proof::kReadback));
  EXPECT_OK(CheckResult(kKey, route_.target(), sound, Proof::kReadback));
}

TEST_P(FaultyTransportTest, FailsThePullThePlanNames) {
  Start({{.kind = FaultKind::kFail,
          .pull = 1,
          .status = Status(Code::kUnavailable, "peer 2 is gone", Reason::kPeerLost)}});
  EXPECT_OK(Pull(Proof::kReadback));
  EXPECT_THAT(Pull(Proof::kReadback), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_OK(Pull(Proof::kReadback));
}

TEST_P(FaultyTransportTest, HoldsAPullUntilItIsCancelledOrLate) {
  Start({{.kind = FaultKind::kDelay, .pull = 0}, {.kind = FaultKind::kDelay, .pull = 1}});
  PullOptions options = Unhurried(world_->peer());
  options.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(30);
  EXPECT_THAT(PullAndWait(world_->target(), kKey, route_.target(), options),
              IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  const auto ended = std::make_shared<std::promise<Status>>();
  world_->target().Pull(kKey, route_.target(), Unhurried(world_->peer()),
                        [ended](Result<PullResult> result) { ended->set_value(result.status()); });
  world_->target().Cancel(SessionId{4});
  world_->target().Cancel(SessionId{5});
  EXPECT_THAT(ended->get_future().get(), IsStatus(Code::kCancelled, Reason::kCancelled));
}

INSTANTIATE_TEST_SUITE_P(All, FaultyTransportTest,
                         ::testing::Values(Inner{"fake", MakeFakeWorld}, Inner{"shm", MakeShmWorld},
                                           Inner{"tcp", MakeTcpWorld}),
                         [](const auto& inner) { return std::string(inner.param.name); });

}  // namespace
}  // namespace tensorbus::transport
