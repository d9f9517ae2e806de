#pragma once

#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <poll.h>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <vector>

#include "tensorbus/base/mapping.h"
#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"
#include "worker_shim/framing.h"

namespace tensorbus::testing {

/// An agent played by hand: a test's script accepts one worker at a time and says what it likes.
/// Every wait has a deadline and fails the test.
class FakeAgent {
 public:
  FakeAgent() {
    std::string folder = ::testing::TempDir() + "tensorbus-agent-XXXXXX";
    EXPECT_NE(::mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    path_ = folder + "/agent.sock";
    Listen();
  }
  ~FakeAgent() {
    Join();
    std::filesystem::remove_all(folder_);
  }
  FakeAgent(const FakeAgent&) = delete;
  FakeAgent& operator=(const FakeAgent&) = delete;

  const std::string& path() const { return path_; }
  wire::ControlPage& page() { return *reinterpret_cast<wire::ControlPage*>(page_.data()); }
  const wire::Hello& hello() const { return hello_; }

  /// Plays `script` in a thread of its own; the destructor or Join() waits for its end.
  void Play(std::function<void()> script) {
    Join();
    thread_ = std::thread(std::move(script));
  }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

  /// Takes the next connection and its hello.
  void Accept() {
    pollfd item = {listener_.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&item, 1, 10'000), 1) << "nobody connected";
    socket_.reset(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ASSERT_TRUE(socket_.valid());
    reader_ = wire::FrameReader();
    wire::Frame frame = Next(wire::MessageType::kHello);
    ASSERT_EQ(frame.fds.size(), 1U);
    ASSERT_OK_AND_ASSIGN(page_, Mapping::Create(frame.fds[0].get(), wire::kControlPageBytes,
                                                Mapping::Access::kReadWrite));
    ASSERT_OK_AND_ASSIGN(hello_, wire::Decode<wire::Hello>(frame.body));
    hello_request_ = frame.request;
  }
  void Welcome(Status status = {}) {
    wire::Welcome welcome;
    welcome.status = std::move(status);
    welcome.agent = "fake";
    Send(wire::MessageType::kWelcome, hello_request_, welcome);
  }
  void AcceptAndWelcome() {
    Accept();
    Welcome();
  }
  /// Answers segments and registration; returns what was registered.
  wire::Register TakeRegistration(MemoryMode mode = MemoryMode::kMapped) {
    while (true) {
      wire::Frame frame = Next();
      if (frame.type == wire::MessageType::kAttachSegment) {
        attached_.push_back(wire::Decode<wire::AttachSegment>(frame.body).value());
        for (UniqueFd& fd : frame.fds) attached_fds_.push_back(std::move(fd));
        Send(wire::MessageType::kReply, frame.request, wire::Reply());
        continue;
      }
      EXPECT_EQ(frame.type, wire::MessageType::kRegister);
      wire::Registered answer;
      answer.mode = mode;
      answer.why = "because";
      answer.epoch = ChannelEpoch{3};
      answer.latest_version = Version{8};
      Send(wire::MessageType::kRegistered, frame.request, answer);
      return wire::Decode<wire::Register>(frame.body).value();
    }
  }

  wire::Frame Next() {
    auto frame = wire::ReadBefore(socket_.get(), reader_, Soon());
    EXPECT_OK(frame);
    return frame.ok() ? *std::move(frame) : wire::Frame();
  }
  wire::Frame Next(wire::MessageType type) {
    wire::Frame frame = Next();
    EXPECT_EQ(static_cast<int>(frame.type), static_cast<int>(type));
    return frame;
  }
  /// The worker has closed.
  void ExpectEnd() {
    EXPECT_THAT(wire::ReadBefore(socket_.get(), reader_, Soon()),
                IsStatus(Code::kUnavailable, Reason::kPeerLost));
  }

  template <typename Message>
  void Send(wire::MessageType type, std::uint64_t request, const Message& message,
            std::vector<UniqueFd> fds = {}) {
    SendBytes(type, request, wire::Encode(message), std::move(fds));
  }
  void SendBytes(wire::MessageType type, std::uint64_t request, std::vector<std::byte> body,
                 std::vector<UniqueFd> fds = {}) {
    wire::FrameWriter writer;
    EXPECT_OK(writer.Add(type, request, std::move(body), std::move(fds)));
    EXPECT_OK(wire::FlushBefore(socket_.get(), writer, Soon()));
  }
  /// What no agent would say.
  void SendText(const std::string& text) {
    EXPECT_EQ(::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }
  void Close() { socket_.reset(); }
  void StopListening() { listener_.reset(); }
  /// A new agent at the same place.
  void Listen() {
    std::filesystem::remove(path_);
    listener_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    ASSERT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::listen(listener_.get(), 8), 0);
  }

  const std::vector<wire::AttachSegment>& attached() const { return attached_; }
  const std::vector<UniqueFd>& attached_fds() const { return attached_fds_; }

 private:
  std::string folder_;
  std::string path_;
  UniqueFd listener_;
  UniqueFd socket_;
  wire::FrameReader reader_;
  Mapping page_;
  wire::Hello hello_;
  std::uint64_t hello_request_ = 0;
  std::vector<wire::AttachSegment> attached_;
  std::vector<UniqueFd> attached_fds_;
  std::thread thread_;
};

}  // namespace tensorbus::testing
