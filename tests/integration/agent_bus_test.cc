#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <gtest/gtest.h>
#include <memory>
#include <poll.h>
#include <spawn.h>
#include <string>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "tests/testing/sanitized.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent/fake_worker.h"

// Real tensorbusd and tensorbus-agent processes; the workers are in this process.
namespace tensorbus {
namespace {

using testing::FakeWorker;
using testing::IsStatus;
using testing::kSanitized;

/// A program we started; killed and waited for when it dies with us.
class Process {
 public:
  Process(std::vector<std::string> command, const std::string& log) {
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                       0600);
    posix_spawnattr_t attributes;
    ::posix_spawnattr_init(&attributes);
    if (::posix_spawnp(&pid_, argv[0], &actions, &attributes, argv.data(), environ) != 0) pid_ = -1;
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() { Kill(SIGKILL); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Signals and waits; the exit status, or -1 when a signal ended it or it did not end in time.
  int Kill(int signal) {
    if (pid_ <= 0) return -1;
    ::kill(pid_, signal);
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    pollfd item = {pidfd.get(), POLLIN, 0};
    if (::poll(&item, 1, 10000) != 1) ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

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

class AgentBus : public ::testing::Test {
 protected:
  void TearDown() override {
    workers_.clear();
    agents_.clear();
    daemon_.reset();
    if (!HasFailure()) return;
    std::ifstream log(dir_.Join("log"));
    std::cerr << log.rdbuf();
  }

  void StartDaemon() {
    daemon_ = std::make_unique<Process>(
        std::vector<std::string>{TENSORBUSD, "--listen", "unix:" + dir_.Join("daemon.sock")},
        dir_.Join("log"));
  }
  void StartAgent(const std::string& name, const std::vector<std::string>& prefix = {},
                  const std::vector<std::string>& more = {}) {
    std::vector<std::string> command = prefix;
    command.insert(command.end(), {TENSORBUS_AGENT, "--daemon", "unix:" + dir_.Join("daemon.sock"),
                                   "--socket", dir_.Join(name + ".sock"), "--name", "agent-" + name,
                                   "--host", "host-" + name, "--copy-threads", "2"});
    command.insert(command.end(), more.begin(), more.end());
    agents_.push_back(std::make_unique<Process>(command, dir_.Join("log")));
  }

  FakeWorker& Add(const std::string& agent, RankIdentity identity, const Box& box,
                  FlipMode flip = FlipMode::kInPlace, Proof proof = Proof::kReadback) {
    workers_.push_back(std::make_unique<FakeWorker>(dir_.Join(agent + ".sock"), identity));
    FakeWorker& worker = *workers_.back();
    const std::array<std::uint64_t, 2> dims = {kRows, kColumns};
    worker.AddTensor("w", *Shape::Create(dims), box);
    EXPECT_OK(ConnectSoon(worker));
    EXPECT_OK(worker.Register(flip, proof));
    return worker;
  }
  /// Until the agent listens.
  static Status ConnectSoon(FakeWorker& worker) {
    const TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      const Status connected = worker.Connect();
      const bool not_there = connected.native() == ENOENT || connected.native() == ECONNREFUSED;
      if (connected.ok() || !not_there || std::chrono::steady_clock::now() > deadline) {
        return connected;
      }
      ::poll(nullptr, 0, 5);
    }
  }
  static Box BoxOf(Range rows, Range columns) {
    const std::array<Range, 2> ranges = {rows, columns};
    return Box(ranges);
  }
  static RankIdentity Trainer(std::uint32_t rank, std::uint32_t count) {
    return {.channel = "policy",
            .job = "trainer",
            .role = Role::kProducer,
            .replica = 0,
            .rank = rank,
            .rank_count = count};
  }
  static RankIdentity Engine(std::uint32_t replica, std::uint32_t rank, std::uint32_t count) {
    return {.channel = "policy",
            .job = "engine",
            .role = Role::kConsumer,
            .replica = replica,
            .rank = rank,
            .rank_count = count};
  }

  static constexpr std::uint64_t kRows = 1024;
  static constexpr std::uint64_t kColumns = 512;
  testing::TempDir dir_;
  std::unique_ptr<Process> daemon_;
  std::vector<std::unique_ptr<Process>> agents_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
};

/// One trainer rank's publish after it got its memory back.
void PublishAll(const std::vector<FakeWorker*>& sources, std::uint32_t version) {
  for (FakeWorker* const source : sources) {
    if (version > 1) {
      ASSERT_OK(source->Release(version - 1).status);
      source->BumpWriteCount();
    }
    source->Fill(version);
    ASSERT_OK(source->Publish(version));
  }
}

void UpdateAll(const std::vector<FakeWorker*>& targets, std::uint32_t version) {
  std::vector<std::uint64_t> requests;
  for (FakeWorker* const target : targets) requests.push_back(target->StartUpdate());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const wire::Updated updated = targets[i]->AwaitUpdate(requests[i]);
    ASSERT_OK(updated.status);
    ASSERT_EQ(updated.version, Version{version});
    ASSERT_EQ(targets[i]->CountWrong(version), 0U) << "target " << i;
  }
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
    if (!ConnectSoon(worker).ok() || !worker.Register(GetParam().flip).ok()) ::_exit(1);
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
