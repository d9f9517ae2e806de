#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensorbus/base/status.h"

namespace tensorbus::testing {

inline Status ToStatus(const Status& status) {
  return status;
}
template <typename T>
Status ToStatus(const Result<T>& result) {
  return result.status();
}

/// Matches a Status or Result that failed with exactly this code and reason.
MATCHER_P2(IsStatus, code, reason, "") {
  const Status status = ToStatus(arg);
  *result_listener << status;
  return status.code() == code && status.reason() == reason;
}

MATCHER(IsOk, "") {
  const Status status = ToStatus(arg);
  *result_listener << status;
  return status.ok();
}

}  // namespace tensorbus::testing

#define ASSERT_OK(expr) ASSERT_THAT((expr), ::tensorbus::testing::IsOk())
#define EXPECT_OK(expr) EXPECT_THAT((expr), ::tensorbus::testing::IsOk())
#define ASSERT_OK_AND_ASSIGN(lhs, expr) \
  ASSERT_OK_AND_ASSIGN_IMPL_(TB_CONCAT_(tb_test_result_, __LINE__), lhs, expr)
#define ASSERT_OK_AND_ASSIGN_IMPL_(result, lhs, expr) \
  auto result = (expr);                               \
  ASSERT_OK(result);                                  \
  lhs = std::move(result).value()
