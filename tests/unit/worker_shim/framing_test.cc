#include "worker_shim/framing.h"

#include <array>
#include <cstring>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "tensorbus/base/mapping.h"
#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::wire {
namespace {

using tensorbus::testing::IsStatus;

class Framing : public ::testing::Test {
 protected:
  void SetUp() override {
    std::array<int, 2> ends = {};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    here_.reset(ends[0]);
    there_.reset(ends[1]);
  }

  static TimePoint Now() { return std::chrono::steady_clock::now(); }
  static std::vector<std::byte> Body(std::size_t size) {
    std::vector<std::byte> body(size);
    for (std::size_t i = 0; i < size; ++i) body[i] = static_cast<std::byte>(i * 7);
    return body;
  }
  void SendRaw(std::span<const std::byte> bytes, std::span<const int> fds = {}) {
    iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) std::array<char, 1024> control = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(fds.size_bytes());
      cmsghdr* item = CMSG_FIRSTHDR(&message);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(fds.size_bytes());
      std::memcpy(CMSG_DATA(item), fds.data(), fds.size_bytes());
    }
    ASSERT_EQ(::sendmsg(here_.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  static std::vector<std::byte> Header(const FrameHeader& header) {
    std::vector<std::byte> bytes(sizeof header);
    std::memcpy(bytes.data(), &header, sizeof header);
    return bytes;
  }
  static int OpenFds() {
    int count = 0;
    for (int fd = 0; fd < 256; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return count;
  }

  UniqueFd here_;
  UniqueFd there_;
  FrameWriter writer_;
  FrameReader reader_;
};

TEST_F(Framing, CarriesFramesInOrder) {
  ASSERT_OK(writer_.Add(MessageType::kPing, 1, {}));
  ASSERT_OK(writer_.Add(MessageType::kPublish, 2, Body(100)));
  ASSERT_OK(writer_.Add(MessageType::kPing, 3, Body(1)));
  EXPECT_EQ(writer_.queued_bytes(), 3 * sizeof(FrameHeader) + 101);
  ASSERT_OK(FlushBefore(here_.get(), writer_, testing::Soon()));
  EXPECT_EQ(writer_.queued_bytes(), 0U);
  for (const std::uint64_t request : {1U, 2U, 3U}) {
    ASSERT_OK_AND_ASSIGN(const Frame frame, ReadBefore(there_.get(), reader_, testing::Soon()));
    EXPECT_EQ(frame.request, request);
    if (request == 2) {
      EXPECT_EQ(frame.type, MessageType::kPublish);
      EXPECT_EQ(frame.body, Body(100));
    }
  }
  ASSERT_OK_AND_ASSIGN(const auto none, reader_.Read(there_.get()));
  EXPECT_FALSE(none.has_value());
}

TEST_F(Framing, CarriesDescriptorsWithTheirFrame) {
  for (const char* name : {"one", "two"}) {
    ASSERT_OK_AND_ASSIGN(UniqueFd fd, CreateMemfd(name, name[0] == 'o' ? 4096 : 8192));
    std::vector<UniqueFd> fds;
    fds.push_back(std::move(fd));
    ASSERT_OK(writer_.Add(MessageType::kAttachSegment, 1, Body(40), std::move(fds)));
    ASSERT_OK(writer_.Add(MessageType::kPing, 2, {}));
  }
  ASSERT_OK(FlushBefore(here_.get(), writer_, testing::Soon()));
  for (const off_t size : {4096, 8192}) {
    ASSERT_OK_AND_ASSIGN(const Frame frame, ReadBefore(there_.get(), reader_, testing::Soon()));
    ASSERT_EQ(frame.fds.size(), 1U);
    struct stat info = {};
    ASSERT_EQ(::fstat(frame.fds[0].get(), &info), 0);
    EXPECT_EQ(info.st_size, size);
    EXPECT_NE(::fcntl(frame.fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
    ASSERT_OK_AND_ASSIGN(const Frame ping, ReadBefore(there_.get(), reader_, testing::Soon()));
    EXPECT_TRUE(ping.fds.empty());
  }
}

TEST_F(Framing, CarriesABodyLargerThanTheSocket) {
  const auto body = Body(5U << 20);
  ASSERT_OK(writer_.Add(MessageType::kRegister, 9, body));
  ASSERT_OK_AND_ASSIGN(const bool done, writer_.Flush(here_.get()));
  EXPECT_FALSE(done);
  std::jthread sender([&] { EXPECT_OK(FlushBefore(here_.get(), writer_, testing::Soon())); });
  ASSERT_OK_AND_ASSIGN(const Frame frame, ReadBefore(there_.get(), reader_, testing::Soon()));
  EXPECT_EQ(frame.body, body);
}

TEST_F(Framing, PutsAFrameTogetherByteByByte) {
  auto bytes = Header({.body_bytes = 3, .type = 12, .fd_count = 0, .request = 5});
  for (const std::byte b : Body(3)) bytes.push_back(b);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    ASSERT_OK_AND_ASSIGN(const auto none, reader_.Read(there_.get()));
    EXPECT_FALSE(none.has_value());
    SendRaw({&bytes[i], 1});
  }
  ASSERT_OK_AND_ASSIGN(const auto frame, reader_.Read(there_.get()));
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->body, Body(3));
}

TEST_F(Framing, NamesAClosedPeerAndKeepsSayingSo) {
  here_.reset();
  EXPECT_THAT(reader_.Read(there_.get()), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_THAT(reader_.Read(there_.get()), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  ASSERT_OK(writer_.Add(MessageType::kPing, 1, {}));
  EXPECT_THAT(writer_.Flush(there_.get()), IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

TEST_F(Framing, GivesUpAtTheDeadline) {
  EXPECT_THAT(ReadBefore(there_.get(), reader_, Now() + std::chrono::milliseconds(5)),
              IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  ASSERT_OK(writer_.Add(MessageType::kRegister, 9, Body(5U << 20)));
  EXPECT_THAT(FlushBefore(here_.get(), writer_, Now() + std::chrono::milliseconds(5)),
              IsStatus(Code::kDeadlineExceeded, Reason::kNone));
}

TEST_F(Framing, RefusesALengthBeyondItsBound) {
  FrameReader small(100);
  SendRaw(Header({.body_bytes = 101, .type = 12, .fd_count = 0, .request = 1}));
  EXPECT_THAT(small.Read(there_.get()), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(Framing, RefusesDescriptorsNobodyAnnounced) {
  const int before = OpenFds();
  const std::array<int, 1> fds = {here_.get()};
  SendRaw(Header({.body_bytes = 0, .type = 12, .fd_count = 0, .request = 1}), fds);
  EXPECT_THAT(reader_.Read(there_.get()), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  reader_ = FrameReader();
  SendRaw(Header({.body_bytes = 4, .type = 12, .fd_count = 0, .request = 1}));
  SendRaw(Body(4), fds);
  EXPECT_THAT(reader_.Read(there_.get()), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  reader_ = FrameReader();
  EXPECT_EQ(OpenFds(), before) << "a refused descriptor stays open";
}

TEST_F(Framing, RefusesAMissingDescriptor) {
  SendRaw(Header({.body_bytes = 0, .type = 12, .fd_count = 1, .request = 1}));
  EXPECT_THAT(reader_.Read(there_.get()), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(Framing, RefusesMoreDescriptorsThanAFrameMayCarry) {
  const int before = OpenFds();
  std::vector<int> fds(kMaxFrameFds + 3, here_.get());
  SendRaw(Header({.body_bytes = 0,
                  .type = 12,
                  .fd_count = static_cast<std::uint16_t>(fds.size()),
                  .request = 1}),
          fds);
  EXPECT_THAT(reader_.Read(there_.get()), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  reader_ = FrameReader();
  EXPECT_EQ(OpenFds(), before);
  EXPECT_THAT(writer_.Add(MessageType::kPing, 1, {}, std::vector<UniqueFd>(kMaxFrameFds + 1)),
              IsStatus(Code::kResourceExhausted, Reason::kNone));
}

}  // namespace
}  // namespace tensorbus::wire
