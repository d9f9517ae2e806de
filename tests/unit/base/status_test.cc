#include "tensorbus/base/status.h"

#include <cerrno>

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

using testing::IsStatus;

Status FailIf(bool fail) {
  if (fail) return {Code::kNotFound, "no such thing", Reason::kUnknownTensor};
  return {};
}

Result<int> Twice(Result<int> in) {
  TB_ASSIGN_OR_RETURN(const int value, std::move(in));
  return 2 * value;
}

TEST(Status, SuccessSaysOk) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().ToString(), "OK");
}

TEST(Status, PrintsCodeReasonAndMessage) {
  EXPECT_EQ(FailIf(true).ToString(), "NOT_FOUND (unknown_tensor): no such thing");
}

TEST(Status, AnnotatePutsContextFirstAndKeepsTheRest) {
  const Status status = FailIf(true).Annotate("tensor a");
  EXPECT_EQ(status.message(), "tensor a: no such thing");
  EXPECT_THAT(status, IsStatus(Code::kNotFound, Reason::kUnknownTensor));
  EXPECT_OK(Status().Annotate("nothing happened"));
}

TEST(Status, EveryReasonHasANameAndAScope) {
  for (int r = 1; r <= static_cast<int>(Reason::kBusy); ++r) {
    EXPECT_NE(ReasonName(static_cast<Reason>(r)), "") << r;
    EXPECT_NE(ReasonName(static_cast<Reason>(r)), "unknown") << r;
  }
  EXPECT_EQ(ScopeOf(Reason::kPeerLost), Scope::kPeer);
  EXPECT_EQ(ScopeOf(Reason::kChecksumMismatch), Scope::kRequest);
}

TEST(Status, ErrnoKeepsTheNumberAndFindsTheNearestCode) {
  const Status status = ErrnoStatus(ENOSPC, "write");
  EXPECT_THAT(status, IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
  EXPECT_EQ(status.native(), ENOSPC);
  EXPECT_THAT(status.message(), ::testing::StartsWith("write: "));
}

TEST(Result, CarriesAValueOrAStatus) {
  ASSERT_OK_AND_ASSIGN(const int four, Twice(2));
  EXPECT_EQ(four, 4);
  EXPECT_THAT(Twice(FailIf(true)), IsStatus(Code::kNotFound, Reason::kUnknownTensor));
}

TEST(ResultDeathTest, ValueOfAFailureAborts) {
  Result<int> failed = FailIf(true);
  EXPECT_DEATH(static_cast<void>(failed.value()), "check failed");
}

}  // namespace
}  // namespace tensorbus
