#include "tensorbus/rpc/status_map.h"

#include <gtest/gtest.h>

#include "tests/testing/status_matchers.h"

namespace tensorbus::rpc {
namespace {

TEST(StatusMap, CarriesEveryReasonThroughMessagesAndCalls) {
  for (int reason = 0; reason <= static_cast<int>(Reason::kBusy); ++reason) {
    const Status status(Code::kAborted, "policy/trainer rank 1 of 4 left",
                        static_cast<Reason>(reason), -7);
    EXPECT_EQ(FromProto(ToProto(status)), status);
    EXPECT_EQ(FromGrpc(ToGrpc(status)), status);
  }
}

TEST(StatusMap, KeepsOkOk) {
  EXPECT_OK(FromProto(ToProto(Status())));
  EXPECT_OK(FromGrpc(ToGrpc(Status())));
  EXPECT_OK(FromProto(proto::Error()));
}

TEST(StatusMap, KeepsNewerPeersErrorsErrors) {
  proto::Error error;
  error.set_code(99);
  error.set_reason(255);
  error.set_message("from the future");
  const Status status = FromProto(error);
  EXPECT_THAT(status, testing::IsStatus(Code::kUnknown, Reason::kNone));
  EXPECT_EQ(status.message(), "from the future");
}

TEST(StatusMap, SurvivesDetailsThatAreNotOurs) {
  const grpc::Status foreign(grpc::StatusCode::UNAVAILABLE, "Socket closed", "\xff\xff garbage");
  EXPECT_THAT(FromGrpc(foreign), testing::IsStatus(Code::kUnavailable, Reason::kNone));
}

}  // namespace
}  // namespace tensorbus::rpc
