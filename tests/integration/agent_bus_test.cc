#include "tests/integration/agent_bus.h"

#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "tests/testing/sanitized.h"

namespace tensorbus {
namespace {

using testing::AgentBus;
using testing::BoxOf;
using testing::Engine;
using testing::FakeWorker;
using testing::IsStatus;
using testing::kSanitized;
using testing::PublishAll;
using testing::Trainer;
using testing::UpdateAll;

std::size_t FdCount(pid_t pid) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid))) {
    ++count;
  }
  return count;
}

std::uint64_t ResidentKib(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::strtoull(line.c_str() + 6, nullptr, 10);
  }
  return 0;
}

TEST_F(AgentBus, FiftyRefreshesLeaveDescriptorsAndMemoryFlat) {
  StartDaemon();
  StartAgent("a");
  std::vector<FakeWorker*> sources = {&Add("a", Trainer(0, 2), BoxOf({0, 512}, {0, kColumns})),
                                      &Add("a", Trainer(1, 2), BoxOf({512, kRows}, {0, kColumns}))};
  std::vector<FakeWorker*> targets = {
      &Add("a", Engine(0, 0, 2), BoxOf({0, kRows}, {0, 256}), FlipMode::kShadow),
      &Add("a", Engine(0, 1, 2), BoxOf({0, kRows}, {256, kColumns}), FlipMode::kShadow)};
  std::size_t fds = 0;
  std::uint64_t resident = 0;
  for (std::uint32_t version = 1; version <= 50; ++version) {
    ASSERT_NO_FATAL_FAILURE(PublishAll(sources, version));
    ASSERT_NO_FATAL_FAILURE(UpdateAll(targets, version));
    if (version == 10) {
      fds = FdCount(agents_[0]->pid());
      resident = ResidentKib(agents_[0]->pid());
    }
  }
  EXPECT_EQ(FdCount(agents_[0]->pid()), fds);
  if (!kSanitized) {
    EXPECT_LE(ResidentKib(agents_[0]->pid()), resident + resident / 50) << "2 %";
  }
  EXPECT_EQ(agents_[0]->Kill(SIGTERM), 0) << "ends cleanly";
  EXPECT_EQ(::access(dir_.Join("a.sock").c_str(), F_OK), -1);
}

TEST_F(AgentBus, AnAgentThatIsStoppedTellsItsWorkers) {
  StartDaemon();
  StartAgent("a");
  const FakeWorker& worker = Add("a", Trainer(0, 1), BoxOf({0, kRows}, {0, kColumns}));
  EXPECT_EQ(agents_[0]->Kill(SIGTERM), 0) << "ends cleanly";
  EXPECT_TRUE(Soon([&worker] { return worker.broken_off().message() == "the agent was stopped"; }))
      << worker.broken_off();
}

TEST_F(AgentBus, ADaemonThatIsKilledAndComesBackIsToldEverything) {
  StartDaemon();
  StartAgent("a");
  FakeWorker& source = Add("a", Trainer(0, 1), BoxOf({0, kRows}, {0, kColumns}));
  FakeWorker& target = Add("a", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}));
  ASSERT_NO_FATAL_FAILURE(PublishAll({&source}, 1));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 1));
  daemon_->Kill(SIGKILL);
  const wire::Updated lost = target.Update(/*timeout_ms=*/300);
  EXPECT_THAT(lost.status, IsStatus(Code::kUnavailable, Reason::kNotRunning));
  EXPECT_EQ(target.CountWrong(1), 0U) << "the worker lives on with what it had";
  StartDaemon();
  source.BumpWriteCount();
  source.Fill(2);
  ASSERT_OK(source.Publish(2));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 2));
}

TEST_F(AgentBus, AnAgentThatIsKilledFailsWhoWaitsAndANewOneServesThem) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  Add("a", Trainer(0, 1), BoxOf({0, kRows}, {0, kColumns}));
  FakeWorker& target = Add("b", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}));
  const std::uint64_t request = target.StartUpdate();
  agents_[1]->Kill(SIGKILL);
  EXPECT_THAT(target.AwaitUpdate(request).status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  StartAgent("b");
  FakeWorker& again = Add("b", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}));
  ASSERT_NO_FATAL_FAILURE(PublishAll({workers_[0].get()}, 1));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&again}, 1));
}

/// At which hook of the second session an engine rank's process is killed.
struct Death {
  const char* name;
  FlipMode flip;
  wire::MessageType hook;
};

class AgentDeath : public AgentBus, public ::testing::WithParamInterface<Death> {
 protected:
  /// A process of its own for engine rank 1: takes a version, then dies in its hook.
  pid_t StartRank() {
    const pid_t child = ::fork();
    if (child != 0) return child;
    FakeWorker worker(dir_.Join("a.sock"), Engine(0, 1, 2));
    const std::array<std::uint64_t, 2> dims = {kRows, kColumns};
    worker.AddTensor("w", *Shape::Create(dims), BoxOf({0, kRows}, {256, kColumns}));
    const Status connected = OnceItListens([&] { return worker.Connect(); });
    if (!connected.ok() || !worker.Register(GetParam().flip).ok()) ::_exit(1);
    int lives = 1;
    worker.SetHook([&lives](wire::MessageType hook) {
      if (hook == GetParam().hook && lives-- == 0) ::kill(::getpid(), SIGKILL);
      return Status();
    });
    while (worker.Update().status.code() != Code::kUnavailable) {
    }
    ::_exit(0);
  }
};

TEST_P(AgentDeath, FailsTheSessionNamesTheRankAndHealsWhenItIsBack) {
  const pid_t first = StartRank();  // before this process has threads
  ASSERT_GT(first, 0);
  StartDaemon();
  StartAgent("a");
  FakeWorker& source = Add("a", Trainer(0, 1), BoxOf({0, kRows}, {0, kColumns}));
  FakeWorker& target = Add("a", Engine(0, 0, 2), BoxOf({0, kRows}, {0, 256}), GetParam().flip);
  ASSERT_NO_FATAL_FAILURE(PublishAll({&source}, 1));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 1));
  source.Fill(2);
  ASSERT_OK(source.Publish(2));
  const wire::Updated failed = target.Update();
  EXPECT_FALSE(failed.status.ok());
  EXPECT_NE(failed.status.message().find("rank 1 of 2"), std::string::npos) << failed.status;
  int status = 0;
  ASSERT_EQ(::waitpid(first, &status, 0), first);
  EXPECT_TRUE(WIFSIGNALED(status));
  const bool shadow = GetParam().flip == FlipMode::kShadow;
  if (shadow && GetParam().hook == wire::MessageType::kFlipBegin) {
    EXPECT_EQ(target.CountWrong(1), 0U) << "the old version, bit for bit";
  }
  // A new process for the rank; then both take the version.
  FakeWorker& again =
      Add("a", Engine(0, 1, 2), BoxOf({0, kRows}, {256, kColumns}), GetParam().flip);
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target, &again}, 2));
}

INSTANTIATE_TEST_SUITE_P(
    Hooks, AgentDeath,
    ::testing::Values(Death{"FenceInPlace", FlipMode::kInPlace, wire::MessageType::kFence},
                      Death{"StopShadow", FlipMode::kShadow, wire::MessageType::kFlipBegin},
                      Death{"LiveShadow", FlipMode::kShadow, wire::MessageType::kLive},
                      Death{"LiveInPlace", FlipMode::kInPlace, wire::MessageType::kLive}),
    [](const ::testing::TestParamInfo<Death>& death) { return std::string(death.param.name); });

/// Two network namespaces joined by a cable, gone when the test is over.
class AgentHosts : public AgentBus {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "network namespaces need root";
    if (!Run("ip -V")) GTEST_SKIP() << "there is no ip program (package iproute2)";
    const std::string id = fmt::format("tb{}", ::getpid());
    for (const char* side : {"a", "b"}) {
      if (!Run(fmt::format("ip netns add {}{}", id, side))) {
        GTEST_SKIP() << "this machine does not allow network namespaces";
      }
      spaces_.push_back(id + side);
    }
    ASSERT_TRUE(Run(fmt::format("ip link add {0}a type veth peer name {0}b", id)));
    for (const std::string& space : spaces_) {
      const char* address = space.back() == 'a' ? "10.77.0.1" : "10.77.0.2";
      ASSERT_TRUE(Run(fmt::format("ip link set {0} netns {0}", space)));
      ASSERT_TRUE(Run(fmt::format("ip -n {0} addr add {1}/24 dev {0}", space, address)));
      ASSERT_TRUE(Run(fmt::format("ip -n {0} link set {0} up", space)));
      ASSERT_TRUE(Run(fmt::format("ip -n {0} link set lo up", space)));
    }
  }
  void TearDown() override {
    AgentBus::TearDown();
    for (const std::string& space : spaces_) Run("ip netns del " + space);
  }
  static bool Run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;  // NOLINT
  }
  void StartOnHost(std::size_t host) {
    const std::string name(1, spaces_[host].back());
    StartAgent(name, {"ip", "netns", "exec", spaces_[host]},
               {"--data-listen", fmt::format("10.77.0.{}:0", host + 1)});
  }

  std::vector<std::string> spaces_;
};

TEST_F(AgentHosts, SyncOverTcpWithALocalAndARemoteReplicaInOneRun) {
  StartDaemon();
  StartOnHost(0);
  StartOnHost(1);
  std::vector<FakeWorker*> sources = {&Add("a", Trainer(0, 2), BoxOf({0, 512}, {0, kColumns})),
                                      &Add("b", Trainer(1, 2), BoxOf({512, kRows}, {0, kColumns}))};
  FakeWorker& near = Add("a", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}), FlipMode::kShadow);
  std::vector<FakeWorker*> far = {&Add("b", Engine(1, 0, 2), BoxOf({0, kRows}, {0, 200})),
                                  &Add("a", Engine(1, 1, 2), BoxOf({0, kRows}, {200, kColumns}))};
  for (std::uint32_t version = 1; version <= 5; ++version) {
    ASSERT_NO_FATAL_FAILURE(PublishAll(sources, version));
    ASSERT_NO_FATAL_FAILURE(UpdateAll(far, version));
    ASSERT_NO_FATAL_FAILURE(UpdateAll({&near}, version));
  }
}

}  // namespace
}  // namespace tensorbus
