#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <gtest/gtest.h>
#include <memory>
#include <poll.h>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "tensorbus/base/unique_fd.h"
#include "tests/testing/temp_dir.h"

// Daemon, agent and four worker processes whose tensors are private memory, all real.
namespace tensorbus {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

/// A program with pipes to it; killed when it dies with us.
class Child {
 public:
  Child(std::vector<std::string> command, const std::string& log) {
    std::array<int, 2> in = {};
    std::array<int, 2> out = {};
    if (::pipe2(in.data(), O_CLOEXEC) != 0 || ::pipe2(out.data(), O_CLOEXEC) != 0) return;
    input_ = UniqueFd(in[1]);
    output_ = UniqueFd(out[0]);
    const UniqueFd child_in(in[0]);
    const UniqueFd child_out(out[1]);
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    ::posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    ::posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                       0600);
    if (::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid_ = -1;
    ::posix_spawn_file_actions_destroy(&actions);
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void CloseInput() { input_.reset(); }
  /// The next line that begins with `start`, or what came instead of it before the output ended or
  /// a minute had passed.
  std::string Await(const std::string& start) {
    const auto deadline = steady_clock::now() + seconds(60);
    std::string seen;
    for (;;) {
      for (std::size_t end = text_.find('\n'); end != std::string::npos; end = text_.find('\n')) {
        const std::string line = text_.substr(0, end);
        text_.erase(0, end + 1);
        if (line.compare(0, start.size(), start) == 0) return line;
        seen += line + "; ";
      }
      pollfd item = {output_.get(), POLLIN, 0};
      const auto left =
          std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now()).count();
      if (left <= 0 || ::poll(&item, 1, static_cast<int>(left)) != 1) return "timeout: " + seen;
      std::array<char, 4096> bytes;
      const ssize_t got = ::read(output_.get(), bytes.data(), bytes.size());
      if (got <= 0) return "ended: " + seen;
      text_.append(bytes.data(), static_cast<std::size_t>(got));
    }
  }

 private:
  pid_t pid_ = -1;
  UniqueFd input_;
  UniqueFd output_;
  std::string text_;
};

class Modes : public ::testing::Test {
 protected:
  void SetUp() override {
    daemon_ = std::make_unique<Child>(
        std::vector<std::string>{TENSORBUSD, "--listen", "unix:" + dir_.Join("daemon.sock")},
        dir_.Join("log"));
    agent_ = std::make_unique<Child>(
        std::vector<std::string>{TENSORBUS_AGENT, "--daemon", "unix:" + dir_.Join("daemon.sock"),
                                 "--socket", dir_.Join("agent.sock"), "--name", "a", "--host", "a",
                                 "--copy-threads", "2", "--staging-mib", "2", "--bucket-timeout-s",
                                 "2", "--data-listen", "off"},
        dir_.Join("log"));
    const auto deadline = steady_clock::now() + seconds(20);
    while (::access(dir_.Join("agent.sock").c_str(), F_OK) != 0 && steady_clock::now() < deadline) {
      ::poll(nullptr, 0, 5);
    }
  }
  void TearDown() override {
    workers_.clear();
    agent_.reset();
    daemon_.reset();
    if (!HasFailure()) return;
    std::ifstream log(dir_.Join("log"));
    std::cerr << log.rdbuf();
  }

  /// Of the channel `channel_`.
  Child& Start(const std::string& mode, int rank, std::vector<std::string> more) {
    std::vector<std::string> command = {MODE_WORKER, "--socket", dir_.Join("agent.sock"),
                                        "--channel", channel_,   "--mode",
                                        mode,        "--rank",   std::to_string(rank)};
    command.insert(command.end(), more.begin(), more.end());
    workers_.push_back(std::make_unique<Child>(command, dir_.Join("log")));
    return *workers_.back();
  }

  testing::TempDir dir_;
  std::string channel_ = "policy";
  std::unique_ptr<Child> daemon_;
  std::unique_ptr<Child> agent_;
  std::vector<std::unique_ptr<Child>> workers_;
};

TEST_F(Modes, BringEveryVersionWhateverTheFlip) {
  for (const auto& [mode, number] : {std::pair("cma", "mode 2"), std::pair("bucket", "mode 3")}) {
    for (const bool shadow : {false, true}) {
      channel_ = std::string(mode) + (shadow ? "-shadow" : "-in_place");
      SCOPED_TRACE(channel_);
      std::vector<Child*> trainers;
      std::vector<Child*> engines;
      for (int rank = 0; rank < 2; ++rank) trainers.push_back(&Start(mode, rank, {}));
      for (int rank = 0; rank < 2; ++rank) {
        std::vector<std::string> more = {"--engine"};
        if (shadow) more.emplace_back("--shadow");
        engines.push_back(&Start(mode, rank, more));
      }
      for (Child* const engine : engines) {
        const std::string line = engine->Await("mode");
        ASSERT_EQ(line.compare(0, 6, number), 0) << line;
        ASSERT_EQ(engine->Await("version 3"), "version 3 wrong 0");
        ASSERT_EQ(engine->Await("done"), "done");
      }
      for (Child* const trainer : trainers) {
        trainer->CloseInput();
        EXPECT_EQ(trainer->Await("done"), "done");
      }
      workers_.clear();
    }
  }
}

TEST_F(Modes, AServiceThreadServesForABusyTrainer) {
  for (int rank = 0; rank < 2; ++rank) Start("bucket", rank, {"--service", "--versions", "1"});
  Child& engine = Start("any", 0, {"--engine", "--rank-count", "1", "--versions", "1"});
  EXPECT_EQ(engine.Await("version 1"), "version 1 wrong 0");
}

TEST_F(Modes, ATrainerThatWritesBeforeReleaseIsCaught) {
  for (const std::string mode : {"cma", "bucket"}) {
    SCOPED_TRACE(mode);
    channel_ = mode;
    Child& guilty = Start(mode, 0, {"--write-during", "--versions", "1"});
    Child& other = Start(mode, 1, {"--versions", "1"});
    EXPECT_EQ(guilty.Await("wrote"), "wrote");
    EXPECT_EQ(other.Await("published 1"), "published 1");
    Child& engine =
        Start(mode, 0, {"--engine", "--rank-count", "1", "--shadow", "--versions", "1"});
    const std::string line = engine.Await("failed");
    EXPECT_NE(line.find("write_during_publish"), std::string::npos) << line;
    EXPECT_NE(line.find("rank 0 of 2"), std::string::npos) << line;
    workers_.clear();
  }
}

TEST_F(Modes, ATrainerThatNeverServesIsNamed) {
  Start("bucket", 0, {"--versions", "1"}).Await("published 1");
  Start("bucket", 1, {"--never-serve", "--versions", "1"}).Await("published 1");
  Child& engine = Start("cma", 0, {"--engine", "--rank-count", "1", "--shadow", "--versions", "1"});
  const std::string line = engine.Await("failed");
  EXPECT_NE(line.find("missing_rank"), std::string::npos) << line;
  EXPECT_NE(line.find("trainer rank 1 of 2"), std::string::npos) << line;
  EXPECT_NE(line.find("service thread"), std::string::npos) << line;
}

}  // namespace
}  // namespace tensorbus
