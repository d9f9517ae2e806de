#include "agent/private_memory.h"

#include <gtest/gtest.h>

#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/agent/agent_fixture.h"

// Ranks whose memory the agent cannot map, from registration to flip.
namespace tensorbus::testing {
namespace {

constexpr auto kAny = std::uint8_t{0};
constexpr auto kCma = static_cast<std::uint8_t>(MemoryMode::kCma);
constexpr auto kBucket = static_cast<std::uint8_t>(MemoryMode::kBucket);

struct Case {
  const char* name;
  std::optional<std::uint8_t> source;  ///< none: mapped
  std::optional<std::uint8_t> target;
};

class PrivateRanks : public AgentFixture {
 protected:
  /// Two sources by rows and two targets by columns, with a tied tensor in two places.
  void AddAll(const Case& modes) {
    AddSource(0, 2, Rows(0, 32));
    AddSource(1, 2, Rows(32, 64));
    AddTarget(0, 2, Columns(0, 12)).AddAlias();
    AddTarget(1, 2, Columns(12, 24));
    for (auto& source : sources) {
      if (modes.source.has_value()) source->UsePrivateMemory(*modes.source);
    }
    for (auto& target : targets) {
      if (modes.target.has_value()) target->UsePrivateMemory(*modes.target);
    }
  }
};

class PrivateModes : public PrivateRanks, public ::testing::WithParamInterface<Case> {};

TEST_P(PrivateModes, BringEveryVersionInBothFlipsAndAllProofs) {
  for (const FlipMode flip : {FlipMode::kInPlace, FlipMode::kShadow}) {
    for (const Proof proof : {Proof::kStream, Proof::kReadback, Proof::kMemory}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(flip) << static_cast<int>(proof));
      Restart();
      AddAll(GetParam());
      ConnectAll(flip, proof);
      for (std::uint32_t version = 1; version <= 3; ++version) {
        PublishAll(version);
        for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
        for (const auto& target : targets) ASSERT_EQ(target->CountWrong(version), 0U);
        for (auto& source : sources) ASSERT_OK(source->Release(version).status);
      }
    }
  }
}

TEST_P(PrivateModes, SnapshotsAndReceiptsReadTheSameBytes) {
  AddAll(GetParam());
  ConnectAll(FlipMode::kShadow);
  PublishAll(1, wire::SlowConsumer::kSnapshot, /*receipts=*/true);
  for (auto& source : sources) source->Fill(9);  // given back at once
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  for (const auto& target : targets) EXPECT_EQ(target->CountWrong(1), 0U);
  PublishAll(2, wire::SlowConsumer::kWait, /*receipts=*/true);
  sources[1]->At(0, 7) += 1;  // behind the counter's back
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
  }
  for (const auto& target : targets) EXPECT_EQ(target->CountWrong(1), 0U) << "the old version";
}

INSTANTIATE_TEST_SUITE_P(
    All, PrivateModes,
    ::testing::Values(Case{"cma_to_mapped", kCma, {}}, Case{"mapped_to_cma", {}, kCma},
                      Case{"cma_to_cma", kCma, kCma}, Case{"bucket_to_mapped", kBucket, {}},
                      Case{"mapped_to_bucket", {}, kBucket},
                      Case{"bucket_to_bucket", kBucket, kBucket},
                      Case{"cma_to_bucket", kCma, kBucket}, Case{"bucket_to_cma", kBucket, kCma}),
    [](const auto& param) { return std::string(param.param.name); });

TEST_F(PrivateRanks, ARegistrationSaysWhichModeItGotAndWhy) {
  AddSource(0, 3, Rows(0, 8)).UsePrivateMemory(kAny);
  AddSource(1, 3, Rows(8, 16)).UsePrivateMemory(kBucket);
  AddSource(2, 3, Rows(16, 64));
  const std::array<MemoryMode, 3> want = {MemoryMode::kCma, MemoryMode::kBucket,
                                          MemoryMode::kMapped};
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_OK(sources[i]->Connect());
    ASSERT_OK_AND_ASSIGN(const wire::Registered registered, sources[i]->Register());
    EXPECT_EQ(registered.mode, want[i]);
    EXPECT_FALSE(registered.why.empty());
    if (i == 2) continue;
    EXPECT_GT(registered.expected_gb_per_s, 0.0);
    EXPECT_NE(registered.why.find("mapped memory"), std::string::npos) << "names the faster way";
  }
}

TEST_F(PrivateRanks, RefusesToMapPrivateMemory) {
  FakeWorker& mapped = AddSource(0, 1, Rows(0, 64));
  mapped.UsePrivateMemory(static_cast<std::uint8_t>(MemoryMode::kMapped));
  ASSERT_OK(mapped.Connect());
  EXPECT_THAT(mapped.Register(), IsStatus(Code::kInvalidArgument, Reason::kUnsupported));
}

TEST_F(PrivateRanks, AModeThatDoesNotExistBreaksTheConnectionOff) {
  FakeWorker& source = AddSource(0, 1, Rows(0, 64));
  source.UsePrivateMemory(17);
  ASSERT_OK(source.Connect());
  EXPECT_THAT(source.Register(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(PrivateRanks, AWorkerThatNeverServesIsNamedWithTheRemedy) {
  for (const bool source : {true, false}) {
    for (const FlipMode flip : {FlipMode::kShadow, FlipMode::kInPlace}) {
      SCOPED_TRACE(::testing::Message() << source << static_cast<int>(flip));
      bucket_patience = std::chrono::milliseconds(300);
      Restart();
      AddAll({.name = "", .source = kBucket, .target = kBucket});
      ConnectAll(flip);
      PublishAll(1);
      (source ? sources : targets)[1]->ServeBuckets(false);
      const std::string name = source ? "trainer" : "engine";
      for (const auto& updated : UpdateAll()) {
        EXPECT_FALSE(updated.status.ok());
        const std::string message = updated.status.ToString();
        EXPECT_NE(message.find("rank 1 of 2"), std::string::npos) << message;
        EXPECT_NE(message.find(name), std::string::npos) << message;
        EXPECT_NE(message.find("service thread"), std::string::npos) << message;
      }
      const auto failed = daemon.Received(proto::AgentMessage::kSessionFailed);
      ASSERT_FALSE(failed.empty());
      EXPECT_EQ(failed.back().session_failed().error().reason(),
                static_cast<std::uint32_t>(Reason::kMissingRank));
      // It comes back to itself, and so does the session.
      (source ? sources : targets)[1]->ServeBuckets(true);
      for (const auto& updated : UpdateAll()) EXPECT_OK(updated.status);
      for (const auto& target : targets) EXPECT_EQ(target->CountWrong(1), 0U);
    }
  }
}

TEST_F(PrivateRanks, AWorkerThatDiesFailsTheSessionAtOnce) {
  AddAll({.name = "", .source = kBucket, .target = {}});
  ConnectAll(FlipMode::kShadow);
  PublishAll(1);
  sources[0]->ServeBuckets(false);
  const std::vector<std::uint64_t> requests = StartUpdateAll();
  const TimePoint deadline = testing::Soon();
  const std::uint64_t before = sources[0]->bucket_orders();
  while (sources[0]->bucket_orders() == before && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  sources[0]->Disconnect();
  for (const auto& updated : AwaitAll(requests)) {
    EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  }
}

TEST_F(PrivateRanks, ATensorLargerThanTheStagingBudgetFitsThroughIt) {
  for (const std::uint8_t mode : {kCma, kBucket}) {
    SCOPED_TRACE(static_cast<int>(mode));
    staging_bytes = std::uint64_t{1} << 20;
    Restart();
    const std::array<std::uint64_t, 2> dims = {1000, 1024};  // 4 MB
    const Shape shape = *Shape::Create(dims);
    AddSource(0, 1, Rows(0, 64)).AddTensor("large", shape, BoxOf({0, 1000}, {0, 1024}));
    AddTarget(0, 2, Columns(0, 12)).AddTensor("large", shape, BoxOf({0, 1000}, {0, 500}));
    AddTarget(1, 2, Columns(12, 24)).AddTensor("large", shape, BoxOf({0, 1000}, {500, 1024}));
    for (auto* side : {&sources, &targets}) {
      for (auto& worker : *side) worker->UsePrivateMemory(mode);
    }
    ConnectAll(FlipMode::kShadow);
    PublishAll(1);
    for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
    for (const auto& target : targets) EXPECT_EQ(target->CountWrong(1), 0U);
    EXPECT_GT(staging->used_bytes_max(), 0U);
    EXPECT_LE(staging->used_bytes_max(), staging_bytes);
    EXPECT_NE(metrics->Text().find(fmt::format("\ntensorbus_agent_staging_peak_bytes {}\n",
                                               staging->used_bytes_max())),
              std::string::npos)
        << metrics->Text();
  }
}

}  // namespace
}  // namespace tensorbus::testing
