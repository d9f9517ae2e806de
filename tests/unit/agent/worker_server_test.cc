#include "agent/worker_server.h"

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <map>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"

namespace tensorbus::agent {
namespace {

using testing::IsStatus;
using testing::Soon;
using wire::MessageType;

/// A server whose handler writes down what it hears.
class WorkerServerTest : public ::testing::Test {
 protected:
  void Start(WorkerServer::Options options = {}) {
    options.socket_path = dir_.Join("agent.sock");
    auto made = WorkerServer::Create(std::move(options), executor_,
                                     {.on_open =
                                          [this](ConnectionId id, PeerProcess) {
                                            MutexLock lock(mutex_);
                                            opened_.push_back(id);
                                            changed_.NotifyAll();
                                          },
                                      .on_frame =
                                          [this](ConnectionId, wire::Frame frame) {
                                            MutexLock lock(mutex_);
                                            if (frame.type == MessageType::kPing)
                                              server_->Send(opened_.back(), MessageType::kPong,
                                                            frame.request, {});
                                            frames_.push_back(frame.type);
                                            changed_.NotifyAll();
                                          },
                                      .on_closed =
                                          [this](ConnectionId id, const std::string& why) {
                                            MutexLock lock(mutex_);
                                            closed_[id] = why;
                                            changed_.NotifyAll();
                                          }});
    ASSERT_OK(made);
    MutexLock lock(mutex_);  // the handlers run on another thread already
    server_ = *std::move(made);
  }
  ~WorkerServerTest() override {
    server_.reset();
    executor_.Stop();
  }

  UniqueFd Connect() const {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, server_->path().data(), server_->path().size());
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  std::string AwaitClosed() {
    const TimePoint deadline = Soon();
    MutexLock lock(mutex_);
    while (closed_.empty()) {
      if (!changed_.WaitUntil(mutex_, deadline)) return "nothing was closed";
    }
    return closed_.begin()->second;
  }
  std::size_t AwaitFrames(std::size_t count) {
    const TimePoint deadline = Soon();
    MutexLock lock(mutex_);
    while (frames_.size() < count) {
      if (!changed_.WaitUntil(mutex_, deadline)) break;
    }
    return frames_.size();
  }
  void AwaitOpened(std::size_t count = 1) {
    const TimePoint deadline = Soon();
    MutexLock lock(mutex_);
    while (opened_.size() < count && changed_.WaitUntil(mutex_, deadline)) {
    }
  }
  /// What the connection is told before it ends: a Welcome, or a BrokenOff.
  static Status LastWord(const UniqueFd& fd, MessageType type) {
    wire::FrameReader reader;
    const Result<wire::Frame> frame = wire::ReadBefore(fd.get(), reader, Soon());
    if (!frame.ok()) return frame.status();
    EXPECT_EQ(static_cast<int>(frame->type), static_cast<int>(type));
    EXPECT_THAT(wire::ReadBefore(fd.get(), reader, Soon()),
                IsStatus(Code::kUnavailable, Reason::kPeerLost))
        << "the end of the stream";
    if (type == MessageType::kWelcome) return wire::Decode<wire::Welcome>(frame->body)->status;
    return wire::Decode<wire::Reply>(frame->body)->status;
  }
  static void SendTooLong(const UniqueFd& fd) {
    wire::FrameHeader header;
    header.body_bytes = wire::kMaxBodyBytes + 1;
    header.type = static_cast<std::uint16_t>(MessageType::kHello);
    ASSERT_EQ(::write(fd.get(), &header, sizeof header), static_cast<ssize_t>(sizeof header));
  }
  static void Send(const UniqueFd& fd, MessageType type, std::uint64_t request,
                   std::vector<std::byte> body = {}) {
    wire::FrameWriter writer;
    ASSERT_OK(writer.Add(type, request, std::move(body)));
    ASSERT_OK(wire::FlushBefore(fd.get(), writer, Soon()));
  }

  testing::TempDir dir_;
  ThreadExecutor executor_{"test"};
  std::unique_ptr<WorkerServer> server_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<ConnectionId> opened_;  // written under mutex_, on the executor
  std::vector<MessageType> frames_;
  std::map<ConnectionId, std::string> closed_;
};

TEST_F(WorkerServerTest, PassesFramesBothWays) {
  Start();
  const UniqueFd fd = Connect();
  Send(fd, MessageType::kPing, 7);
  wire::FrameReader reader;
  ASSERT_OK_AND_ASSIGN(const wire::Frame pong, wire::ReadBefore(fd.get(), reader, Soon()));
  EXPECT_EQ(pong.type, MessageType::kPong);
  EXPECT_EQ(pong.request, 7U);
}

TEST_F(WorkerServerTest, NoticesTheEndOfAConnection) {
  Start();
  {
    const UniqueFd fd = Connect();
    Send(fd, MessageType::kPing, 1);
    ASSERT_EQ(AwaitFrames(1), 1U);
  }
  EXPECT_NE(AwaitClosed().find("closed its connection"), std::string::npos);
}

TEST_F(WorkerServerTest, NoticesADeadProcessWhoseSocketLivesOnInAChild) {
  Start();
  int hold[2] = {-1, -1};
  ASSERT_EQ(::pipe(hold), 0);
  const pid_t worker = ::fork();
  if (worker == 0) {
    const UniqueFd fd = Connect();
    Send(fd, MessageType::kPing, 1);
    if (::fork() == 0) {
      ::close(hold[1]);
      char byte = 0;
      [[maybe_unused]] const auto got = ::read(hold[0], &byte, 1);  // until the test is over
    }
    ::_exit(0);
  }
  ::close(hold[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(worker, &status, 0), worker);
  EXPECT_NE(AwaitClosed().find("worker process " + std::to_string(worker) + " ended"),
            std::string::npos);
  EXPECT_EQ(frames_.size(), 1U) << "what it said before still counts";
  ::close(hold[1]);
}

TEST_F(WorkerServerTest, ClosesWhoBreaksTheFraming) {
  Start();
  const UniqueFd fd = Connect();
  SendTooLong(fd);
  EXPECT_NE(AwaitClosed().find("broke the protocol"), std::string::npos);
  const Status why = LastWord(fd, MessageType::kWelcome);
  EXPECT_THAT(why, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_NE(why.message().find("broke the protocol"), std::string::npos) << why;
}

TEST_F(WorkerServerTest, TellsWhoBreaksTheFramingAfterItsHello) {
  Start();
  const UniqueFd fd = Connect();
  Send(fd, MessageType::kGoodbye, 0);
  ASSERT_EQ(AwaitFrames(1), 1U);
  SendTooLong(fd);
  EXPECT_THAT(LastWord(fd, MessageType::kBrokenOff),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(WorkerServerTest, TellsWhoIsConnectedThatItIsStopped) {
  Start();
  const UniqueFd fd = Connect();
  Send(fd, MessageType::kGoodbye, 0);
  ASSERT_EQ(AwaitFrames(1), 1U);
  const UniqueFd silent = Connect();
  AwaitOpened(2);
  server_->Stop();
  for (const Status& why :
       {LastWord(fd, MessageType::kBrokenOff), LastWord(silent, MessageType::kWelcome)}) {
    EXPECT_THAT(why, IsStatus(Code::kUnavailable, Reason::kPeerLost));
    EXPECT_EQ(why.message(), "the agent was stopped");
  }
}

TEST_F(WorkerServerTest, ClosesWhoConnectsAndSaysNothing) {
  WorkerServer::Options options;
  options.hello_timeout = std::chrono::milliseconds(1);
  Start(options);
  const UniqueFd fd = Connect();
  EXPECT_NE(AwaitClosed().find("said nothing"), std::string::npos);
  EXPECT_THAT(LastWord(fd, MessageType::kWelcome),
              IsStatus(Code::kDeadlineExceeded, Reason::kNone));
}

TEST_F(WorkerServerTest, ClosesWhoDoesNotReadWhatItIsSent) {
  WorkerServer::Options options;
  options.outbound_bytes_max = 1 << 20;
  Start(options);
  const UniqueFd fd = Connect();
  AwaitOpened();
  for (int i = 0; i < 40; ++i) {
    server_->Send(opened_[0], MessageType::kPong, 0, std::vector<std::byte>(64 << 10));
  }
  EXPECT_NE(AwaitClosed().find("did not read"), std::string::npos);
}

TEST_F(WorkerServerTest, RefusesMoreConnectionsThanItServes) {
  WorkerServer::Options options;
  options.connection_count_max = 1;
  Start(options);
  const UniqueFd first = Connect();
  AwaitOpened();
  const UniqueFd second = Connect();
  wire::FrameReader reader;
  ASSERT_OK_AND_ASSIGN(const wire::Frame frame, wire::ReadBefore(second.get(), reader, Soon()));
  ASSERT_EQ(frame.type, MessageType::kWelcome);
  ASSERT_OK_AND_ASSIGN(const wire::Welcome welcome, wire::Decode<wire::Welcome>(frame.body));
  EXPECT_THAT(welcome.status, IsStatus(Code::kResourceExhausted, Reason::kBusy));
}

TEST_F(WorkerServerTest, PausesWhenDescriptorsRunOutAndGoesOnWhenThereAreSome) {
  Start();
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, server_->path().data(), server_->path().size());
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  ::testing::internal::CaptureStderr();
  const rlimit none = {.rlim_cur = 3, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  pollfd silent = {.fd = fd.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&silent, 1, 300), 0) << "neither let in nor hung up on";
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  Send(fd, MessageType::kPing, 7);
  wire::FrameReader reader;
  EXPECT_OK(wire::ReadBefore(fd.get(), reader, Soon()));
  const std::string log = ::testing::internal::GetCapturedStderr();
  const auto lines = std::count(log.begin(), log.end(), '\n');
  EXPECT_GE(lines, 1);
  EXPECT_LT(lines, 20) << "asked again and again";
}

TEST_F(WorkerServerTest, BoundsWhatWaitsForItsThread) {
  WorkerServer::Options options;
  options.waiting_bytes_max = 1000;
  Start(options);
  const UniqueFd fd = Connect();
  AwaitOpened();
  server_->Send(opened_[0], MessageType::kPong, 0, std::vector<std::byte>(1001));
  EXPECT_NE(AwaitClosed().find("more frames wait"), std::string::npos);
  EXPECT_THAT(LastWord(fd, MessageType::kWelcome),
              IsStatus(Code::kResourceExhausted, Reason::kBusy));
}

TEST_F(WorkerServerTest, LeavesASocketAloneWhileItsFramesWait) {
  WorkerServer::Options options;
  options.inbound_frames_max = 4;
  Start(options);
  const UniqueFd fd = Connect();
  AwaitOpened();
  // The executor is busy: nothing is handled, so the server takes four frames and no more.
  Mutex gate;
  gate.Lock();
  executor_.Post([&gate] { MutexLock wait(gate); });
  for (int i = 0; i < 100; ++i) Send(fd, MessageType::kGoodbye, 0);
  // They are in the socket's buffer; all arrive once the executor is free again.
  gate.Unlock();
  EXPECT_EQ(AwaitFrames(100), 100U);
}

TEST_F(WorkerServerTest, SaysWhatIsQueuedBeforeItClosesAndNothingElse) {
  Start();
  const UniqueFd fd = Connect();
  AwaitOpened();
  // More than the socket takes: it is still closing when the last frame comes.
  server_->Send(opened_[0], MessageType::kPong, 3, std::vector<std::byte>(4 << 20));
  server_->Close(opened_[0], "enough");
  server_->Send(opened_[0], MessageType::kPong, 4, {});
  wire::FrameReader reader;
  ASSERT_OK_AND_ASSIGN(const wire::Frame last, wire::ReadBefore(fd.get(), reader, Soon()));
  EXPECT_EQ(last.request, 3U);
  EXPECT_THAT(wire::ReadBefore(fd.get(), reader, Soon()),
              IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(AwaitClosed(), "enough");
}

}  // namespace
}  // namespace tensorbus::agent
