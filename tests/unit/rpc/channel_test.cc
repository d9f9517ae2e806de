#include "tensorbus/rpc/channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <utility>

#include "tensorbus/rpc/status_map.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::rpc {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsStatus;
using ::testing::Not;

Status FailureAt(const std::string& target, grpc::StatusCode code, const std::string& text) {
  DaemonChannel channel;
  channel.target = target;
  return channel.FailureOf(grpc::Status(code, text));
}

TEST(Channel, PutsInPlainWordsWhyNothingAnswers) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: Failed to "
       "connect "
       "to remote host: Connection refused",
       "nobody listens there"},
      {"DNS resolution failed for h:1: C-ares status is not ARES_SUCCESS qtype=AAAA", "not known"},
      {"failed to connect to all addresses; last error: Network is unreachable", "no way to that"},
      {"failed to connect to all addresses; last error: Connection timed out", "does not answer"},
      {"last error: UNAVAILABLE: ipv4:10.0.0.1:1: Failed parsing HTTP/2", "daemon's protocol"},
      {"last error: INTERNAL: ipv4:10.0.0.1:1: Trying to connect an http1.x server", "protocol"},
      {"last error: UNKNOWN: Ssl handshake failed: SSL_ERROR_SSL", "in place of TLS"},
      {"last error: UNAVAILABLE: ipv4:10.0.0.1:1: Socket closed", "closed the connection"}};
  for (const auto& [text, words] : kTexts) {
    const Status status = FailureAt("10.0.0.1:1", grpc::StatusCode::UNAVAILABLE, text);
    EXPECT_THAT(status, IsStatus(Code::kUnavailable, Reason::kNotRunning));
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("no daemon answers at 10.0.0.1:1: "), HasSubstr(words),
                      HasSubstr("tensorbusctl up"), HasSubstr("--daemon"), Not(HasSubstr(text))));
  }
  EXPECT_THAT(FailureAt("h:1", grpc::StatusCode::UNAVAILABLE, "out of luck").message(),
              HasSubstr("(gRPC: out of luck)"))
      << "what has no words of ours";
}

TEST(Channel, SaysThatWhatListensIsNoDaemon) {
  for (const auto code :
       {grpc::StatusCode::UNIMPLEMENTED, grpc::StatusCode::UNKNOWN, grpc::StatusCode::INTERNAL}) {
    const Status status = FailureAt("h:80", code, "Received http2 header with status: 404");
    EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));
    EXPECT_THAT(status.message(), AllOf(HasSubstr("h:80"), HasSubstr("no tensorbusd")));
  }
}

TEST(Channel, SaysThatADaemonIsSilent) {
  EXPECT_THAT(FailureAt("h:1", grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"),
              IsStatus(Code::kDeadlineExceeded, Reason::kPeerLost));
}

TEST(Channel, LeavesWhatTheDaemonSaysAsItIs) {
  DaemonChannel channel;
  channel.target = "h:1";
  for (const Code code : {Code::kUnavailable, Code::kInternal, Code::kDeadlineExceeded}) {
    const Status said(code, "rank 3 is gone", Reason::kMissingRank, 7);
    EXPECT_EQ(channel.FailureOf(ToGrpc(said)), said);
  }
  EXPECT_OK(channel.FailureOf(grpc::Status::OK));
}

}  // namespace
}  // namespace tensorbus::rpc
