#include "tensorbus/transport/staging_budget.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/testing/status_matchers.h"

namespace tensorbus::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::IsStatus;

TEST(StagingBudget, LeasesReturnWhatTheyTook) {
  const auto budget = StagingBudget::Create(100);
  {
    ASSERT_OK_AND_ASSIGN(StagingBudget::Lease first, budget->TryAcquire(60));
    ASSERT_OK_AND_ASSIGN(const StagingBudget::Lease second, budget->TryAcquire(40));
    EXPECT_EQ(budget->used_bytes(), 100U);
    EXPECT_THAT(budget->TryAcquire(1), IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
    StagingBudget::Lease moved = std::move(first);
    EXPECT_EQ(moved.bytes(), 60U);
    EXPECT_EQ(budget->used_bytes(), 100U);
  }
  EXPECT_EQ(budget->used_bytes(), 0U);
  EXPECT_EQ(budget->used_bytes_max(), 100U);
}

TEST(StagingBudget, RefusesAtOnceWhatCanNeverFit) {
  const auto budget = StagingBudget::Create(100);
  EXPECT_THAT(budget->Acquire(101, steady_clock::now() + seconds(60)),
              IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
}

TEST(StagingBudget, WaitsUntilTheDeadlineAndThenLetsOthersPass) {
  const auto budget = StagingBudget::Create(100);
  ASSERT_OK_AND_ASSIGN(const StagingBudget::Lease held, budget->TryAcquire(50));
  EXPECT_THAT(budget->Acquire(60, steady_clock::now() + milliseconds(20)),
              IsStatus(Code::kDeadlineExceeded, Reason::kOutOfMemory));
  EXPECT_OK(budget->Acquire(50, steady_clock::now()));
}

TEST(StagingBudget, NeverExceedsItsBoundUnderContention) {
  const auto budget = StagingBudget::Create(100);
  std::atomic<int> served{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 200; ++i) {
          const auto lease = budget->Acquire(static_cast<std::uint64_t>(20 + 25 * t),
                                             steady_clock::now() + seconds(30));
          if (lease.ok()) ++served;
        }
      });
    }
  }
  EXPECT_EQ(served.load(), 800);
  EXPECT_EQ(budget->used_bytes(), 0U);
  EXPECT_LE(budget->used_bytes_max(), 100U);
}

}  // namespace
}  // namespace tensorbus::transport
