#include "tensorbus/cli/bench_protocol.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include "tensorbus/base/unique_fd.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::cli {
namespace {

using testing::IsStatus;

class BenchProtocol : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2] = {-1, -1};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    bench_ = UniqueFd(ends[0]);
    worker_ = UniqueFd(ends[1]);
  }

  UniqueFd bench_;
  UniqueFd worker_;
};

TEST_F(BenchProtocol, CarriesNumbersAndText) {
  BenchReply sent = ReplyTo(BenchCommand::kWait, {});
  sent.begin_ns = 3;
  sent.values[kCopySeconds] = 0.5;
  sent.text = "mapped: its arena";
  ASSERT_OK(SendBench(worker_.get(), sent));
  ASSERT_OK_AND_ASSIGN(const BenchReply got, ReceiveReply(bench_.get()));
  EXPECT_EQ(got.command, BenchCommand::kWait);
  EXPECT_EQ(got.begin_ns, 3U);
  EXPECT_EQ(got.values[kCopySeconds], 0.5);
  EXPECT_EQ(got.text, "mapped: its arena");
  EXPECT_OK(StatusOf(got));
  EXPECT_THAT(ReceiveReply(bench_.get()), IsStatus(Code::kDeadlineExceeded, Reason::kNone));
}

TEST_F(BenchProtocol, CutsNoErrorThatAWorkerCanHear) {
  const std::string text = "checksum " + std::string(20'000, '.') + " (trace: /run/traces/7.trace)";
  const Status status(Code::kDataLoss, text, Reason::kChecksumMismatch);
  ASSERT_OK(SendBench(worker_.get(), ReplyTo(BenchCommand::kWait, status)));
  ASSERT_OK_AND_ASSIGN(const BenchReply got, ReceiveReply(bench_.get()));
  EXPECT_EQ(StatusOf(got), status);
}

TEST_F(BenchProtocol, KeepsTheEndOfWhatIsTooLong) {
  const std::string end = " (trace: /run/traces/7.trace)";
  const Status status(Code::kDataLoss, std::string(2 * kMaxBenchTextBytes, '.') + end);
  ASSERT_OK(SendBench(worker_.get(), ReplyTo(BenchCommand::kWait, status)));
  ASSERT_OK_AND_ASSIGN(const BenchReply got, ReceiveReply(bench_.get()));
  ASSERT_EQ(got.text.size(), kMaxBenchTextBytes);
  EXPECT_EQ(got.text.substr(got.text.size() - end.size()), end);
}

TEST_F(BenchProtocol, RefusesMessagesOfAnotherSize) {
  BenchReplyHead head;
  head.text_bytes = 5;
  const auto send = [&](const void* data, std::size_t size) {
    ASSERT_EQ(::send(worker_.get(), data, size, 0), static_cast<ssize_t>(size));
    EXPECT_THAT(ReceiveReply(bench_.get()), IsStatus(Code::kInternal, Reason::kMalformed)) << size;
  };
  send(&head, sizeof head);      // its text is missing
  send(&head, sizeof head - 1);  // no head
  const std::string large(sizeof head + kMaxBenchTextBytes + 1, '\0');
  send(large.data(), large.size());
  ASSERT_OK(SendBench(bench_.get(), BenchReply()));
  EXPECT_THAT(ReceiveCommand(worker_.get()), IsStatus(Code::kInternal, Reason::kMalformed));
  ASSERT_OK(SendBench(bench_.get(), BenchMessage{.command = BenchCommand::kVerify, .version = 4}));
  ASSERT_OK_AND_ASSIGN(const BenchMessage message, ReceiveCommand(worker_.get()));
  EXPECT_EQ(message.version, 4U);
  worker_.reset();
  EXPECT_THAT(ReceiveReply(bench_.get()), IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

}  // namespace
}  // namespace tensorbus::cli
