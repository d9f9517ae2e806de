#pragma once

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <fmt/format.h>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <iostream>
#include <memory>
#include <optional>
#include <poll.h>
#include <spawn.h>
#include <string>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent/bus_ranks.h"
#include "tests/unit/agent/fake_worker.h"

// Real tensorbusd and tensorbus-agent processes; the workers are in this process.
namespace tensorbus::testing {

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
                  FlipMode flip = FlipMode::kInPlace, Proof proof = Proof::kReadback,
                  std::optional<std::uint8_t> private_mode = {}) {
    workers_.push_back(std::make_unique<FakeWorker>(dir_.Join(agent + ".sock"), identity));
    FakeWorker& worker = *workers_.back();
    const std::array<std::uint64_t, 2> dims = {kRows, kColumns};
    worker.AddTensor("w", *Shape::Create(dims), box);
    if (private_mode.has_value()) worker.UsePrivateMemory(*private_mode);
    EXPECT_OK(OnceItListens([&] { return worker.Connect(); }));
    EXPECT_OK(worker.Register(flip, proof));
    return worker;
  }
  /// Whether it came to that in time.
  static bool Soon(const std::function<bool()>& reached) {
    const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
    while (!reached()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      ::poll(nullptr, 0, 5);
    }
    return true;
  }
  /// What an attempt says once the agent listens.
  static Status OnceItListens(const std::function<Status()>& attempt) {
    Status status;
    Soon([&] {
      status = attempt();
      return status.reason() != Reason::kNotRunning && status.native() != ENOENT &&
             status.native() != ECONNREFUSED;
    });
    return status;
  }

  static constexpr Nanos kPatience = std::chrono::seconds(20);
  static constexpr std::uint64_t kRows = 1024;
  static constexpr std::uint64_t kColumns = 512;
  testing::TempDir dir_;
  std::unique_ptr<Process> daemon_;
  std::vector<std::unique_ptr<Process>> agents_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
};

/// One trainer rank's publish after it got its memory back.
inline void PublishAll(const std::vector<FakeWorker*>& sources, std::uint32_t version) {
  for (FakeWorker* const source : sources) {
    if (version > 1) {
      ASSERT_OK(source->Release(version - 1).status);
      source->BumpWriteCount();
    }
    source->Fill(version);
    ASSERT_OK(source->Publish(version));
  }
}

inline void UpdateAll(const std::vector<FakeWorker*>& targets, std::uint32_t version) {
  std::vector<std::uint64_t> requests;
  for (FakeWorker* const target : targets) requests.push_back(target->StartUpdate());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const wire::Updated updated = targets[i]->AwaitUpdate(requests[i]);
    ASSERT_OK(updated.status);
    ASSERT_EQ(updated.version, Version{version});
    ASSERT_EQ(targets[i]->CountWrong(version), 0U) << "target " << i;
  }
}

}  // namespace tensorbus::testing
