#include <atomic>
#include <chrono>
#include <deque>
#include <future>
#include <gtest/gtest.h>

#include "tensorbus/kernels/digest.h"
#include "tensorbus/transport/shm_transport.h"
#include "tests/testing/random_blocks.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_capability.h"

// Pulls of one source that are begun together: each ends as if it were alone.
namespace tensorbus::transport {
namespace {

using std::chrono::seconds;
using testing::BytesOf;
using testing::IsStatus;
using testing::Place;
using testing::PlacedBlock;
using testing::Random;
using testing::WithBytes;

constexpr std::uint64_t kRows = 300;
constexpr std::uint64_t kSession = 7;

/// One source of which each target takes some columns, or (the last) all of it.
class ShmJoint : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kTargets = 4;

  void Start(ShmOptions options = {}) {
    options.part_bytes = 64 << 10;
    shm_ = ShmTransport::Create(std::move(options));
    StridedBlock box;
    box.rank = 2;
    box.item_bytes = 4;
    box.extents = {kRows, 3 * 200};
    box.strides = box.stream_strides = {3 * 800, 4};
    box.key = {.a = 3, .b = 4};
    source_ = Place(random_, box);
    for (std::uint32_t t = 0; t < kTargets; ++t) {
      StridedBlock part = source_.block;
      if (t < 3) {
        part.extents[1] = 200;
        part.base += t * 200 * part.strides[1];
        part.stream_offset += t * std::uint64_t{800};
      }
      StridedBlock empty = part;
      empty.base = nullptr;
      parts_.push_back(part);
      targets_.push_back(Place(random_, empty));
      expected_.push_back(WithBytes(targets_.back(), BytesOf(part)));
      ASSERT_OK(shm_->Expose(Key(t), {.blocks = {part}, .capability = testing::TestCapability()}));
    }
  }
  static RouteKey Key(std::uint32_t target) {
    return {.session = SessionId{kSession}, .source_rank = 1, .target_rank = target};
  }
  void Pull(std::uint32_t target, bool more, Proof proof = Proof::kReadback,
            Capability capability = testing::TestCapability(), Nanos timeout = seconds(60)) {
    PullOptions options;
    options.proof = proof;
    options.deadline = std::chrono::steady_clock::now() + timeout;
    options.capability = capability;
    options.more_follow = more;
    promises_.push_back(std::make_shared<std::promise<Result<PullResult>>>());
    shm_->Pull(Key(target), {.blocks = {targets_[target].block}}, std::move(options),
               [promise = promises_.back()](Result<PullResult> result) {
                 promise->set_value(std::move(result));
               });
  }
  void PullAll(Proof proof = Proof::kReadback) {
    for (std::uint32_t t = 0; t < kTargets; ++t) Pull(t, t + 1 < kTargets, proof);
  }
  Result<PullResult> Outcome(std::size_t index) {
    auto future = promises_[index]->get_future();
    if (future.wait_for(seconds(60)) == std::future_status::ready) return future.get();
    return Status(Code::kInternal, "the pull never ended");
  }
  void ExpectArrived(std::size_t target, std::size_t index, Proof proof = Proof::kReadback) {
    ASSERT_OK_AND_ASSIGN(const PullResult result, Outcome(index));
    EXPECT_EQ(targets_[target].memory, expected_[target]);
    ASSERT_EQ(result.source.blocks.size(), 1U);
    if (proof == Proof::kOff) return;
    EXPECT_EQ(result.source.blocks[0], kernels::DigestBlock(parts_[target]));
    EXPECT_EQ(result.target.blocks[0], result.source.blocks[0]);
  }

  Random random_{71};
  PlacedBlock source_;
  std::vector<StridedBlock> parts_;
  std::deque<PlacedBlock> targets_;
  std::vector<std::vector<std::byte>> expected_;
  std::vector<std::shared_ptr<std::promise<Result<PullResult>>>> promises_;
  std::unique_ptr<ShmTransport> shm_;
};

TEST_F(ShmJoint, EveryTargetGetsItsOwnInEveryProof) {
  for (const Proof proof : {Proof::kOff, Proof::kStream, Proof::kReadback, Proof::kMemory}) {
    SCOPED_TRACE(static_cast<int>(proof));
    parts_.clear();
    targets_.clear();
    expected_.clear();
    promises_.clear();
    Start(proof == Proof::kStream ? ShmOptions{.stream_bytes = 1} : ShmOptions{});
    PullAll(proof);
    for (std::uint32_t t = 0; t < kTargets; ++t) ExpectArrived(t, t, proof);
  }
}

TEST_F(ShmJoint, OneThatMayNotReadFailsAlone) {
  Start();
  Pull(0, true);
  Pull(1, true, Proof::kReadback, Capability());
  Pull(2, false);
  ExpectArrived(0, 0);
  EXPECT_THAT(Outcome(1), IsStatus(Code::kPermissionDenied, Reason::kNone));
  ExpectArrived(2, 2);
}

TEST_F(ShmJoint, DamageAtOneTargetFailsThatOne) {
  ShmOptions options;
  options.landing_hook = [](const RouteKey& key, std::uint32_t, const StridedBlock& place,
                            kernels::ByteRange range) {
    if (key.target_rank == 2 && range.first == 0) *place.base ^= std::byte{1};
  };
  Start(options);
  PullAll();
  EXPECT_THAT(Outcome(2), IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  for (const std::uint32_t t : {0U, 1U, 3U}) ExpectArrived(t, t);
}

TEST_F(ShmJoint, DifferentProofsDoNotMix) {
  Start();
  Pull(0, true, Proof::kStream);
  Pull(1, true, Proof::kOff);
  Pull(2, false, Proof::kReadback);
  ExpectArrived(0, 0, Proof::kStream);
  ExpectArrived(1, 1, Proof::kOff);
  ExpectArrived(2, 2);
}

TEST_F(ShmJoint, CancellingEndsThoseThatWaitForTheRest) {
  Start();
  Pull(0, true);
  Pull(1, true);
  shm_->Cancel(SessionId{kSession + 1});
  shm_->Cancel(SessionId{kSession});
  for (const std::size_t i : {0U, 1U}) {
    EXPECT_THAT(Outcome(i), IsStatus(Code::kCancelled, Reason::kCancelled));
  }
  Pull(2, false);  // nobody is left to wait with
  ExpectArrived(2, 2);
}

TEST_F(ShmJoint, StoppingEndsThoseThatWaitForTheRest) {
  Start();
  Pull(0, true);
  shm_.reset();
  EXPECT_THAT(Outcome(0), IsStatus(Code::kCancelled, Reason::kCancelled));
}

TEST_F(ShmJoint, OneThatIsTooLateFailsAlone) {
  Start();
  Pull(0, true, Proof::kReadback, testing::TestCapability(), Nanos::zero());
  Pull(1, false);
  EXPECT_THAT(Outcome(0), IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  ExpectArrived(1, 1);
}

TEST_F(ShmJoint, ASourceThatIsWithdrawnFailsItsRouteOnly) {
  Start();
  Pull(0, true);
  shm_->Withdraw(Key(0));
  Pull(1, false);
  EXPECT_FALSE(Outcome(0).ok());
  ExpectArrived(1, 1);
}

}  // namespace
}  // namespace tensorbus::transport
