#include "tensorbus/daemon/side_work.h"

#include <future>
#include <gtest/gtest.h>

#include "tests/testing/status_matchers.h"

namespace tensorbus::daemon {
namespace {

using namespace std::chrono_literals;
using Lane = SideWork::Lane;
using testing::IsStatus;

class SideWorkTest : public ::testing::Test {
 protected:
  ~SideWorkTest() override {
    gate_.set_value();
    work_.Stop();
    executor_.Stop();
  }
  template <typename T>
  T OnExecutor(std::function<T()> task) {
    std::promise<T> done;
    executor_.Post([&] { done.set_value(task()); });
    return done.get_future().get();
  }
  /// Starts work that returns `value`, after the gate opened if it `waits`.
  std::future<Result<int>> Start(Lane lane, int value, bool waits = false, Nanos patience = 60s) {
    const auto outcome = std::make_shared<std::promise<Result<int>>>();
    auto future = outcome->get_future();
    last_ = OnExecutor<SideWork::Ticket>([&] {
      return work_.Start<int>(
          lane, "counting", executor_.Now() + patience,
          [this, value, waits]() -> Result<int> {
            if (waits) open_.wait();
            ++runs_;
            return executor_.RunningHere() ? -1 : value;
          },
          [this, outcome](Result<int> result) {
            EXPECT_TRUE(executor_.RunningHere());
            outcome->set_value(std::move(result));
          });
    });
    return future;
  }
  static Result<int> Await(std::future<Result<int>>& future) {
    if (future.wait_for(60s) != std::future_status::ready) {
      return Status(Code::kInternal, "it never ended");
    }
    return future.get();
  }

  std::promise<void> gate_;
  std::shared_future<void> open_ = gate_.get_future().share();
  std::atomic<int> runs_{0};
  SideWork::Ticket last_ = 0;
  ThreadExecutor executor_{"test"};
  ThreadSideWork work_{executor_};
};

TEST_F(SideWorkTest, NeitherTheExecutorNorAnotherLaneWaits) {
  auto blocked = Start(Lane::kRegistrations, 1, /*waits=*/true);
  auto behind = Start(Lane::kRegistrations, 2);
  auto other = Start(Lane::kQuestions, 3);
  EXPECT_EQ(Await(other).value(), 3);  // off the executor, or it were -1
  EXPECT_EQ(OnExecutor<std::size_t>([&] { return work_.waiting(Lane::kRegistrations); }), 2U);
  EXPECT_EQ(blocked.wait_for(0s), std::future_status::timeout);
  EXPECT_EQ(behind.wait_for(0s), std::future_status::timeout);
  gate_.set_value();
  EXPECT_EQ(Await(blocked).value(), 1);
  EXPECT_EQ(Await(behind).value(), 2);
  EXPECT_EQ(OnExecutor<std::size_t>([&] { return work_.waiting(Lane::kRegistrations); }), 0U);
  gate_ = {};
}

TEST_F(SideWorkTest, EndsAtTheDeadlineWhetherItHasBegunOrNot) {
  auto running = Start(Lane::kQuestions, 1, /*waits=*/true, 20ms);
  auto queued = Start(Lane::kQuestions, 2, /*waits=*/false, 20ms);
  EXPECT_THAT(Await(running), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  EXPECT_THAT(Await(queued), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  auto after = Start(Lane::kQuestions, 3);
  gate_.set_value();
  EXPECT_EQ(Await(after).value(), 3);
  EXPECT_EQ(runs_, 2) << "what nobody waits for any more is not begun";
  gate_ = {};
}

TEST_F(SideWorkTest, WhatIsCancelledIsNotBegunAndNotHeardOf) {
  auto running = Start(Lane::kQuestions, 1, /*waits=*/true);
  auto queued = Start(Lane::kQuestions, 2);
  OnExecutor<bool>([&] {
    work_.Cancel(last_);
    return true;
  });
  auto after = Start(Lane::kQuestions, 3);
  gate_.set_value();
  EXPECT_EQ(Await(after).value(), 3);
  EXPECT_EQ(Await(running).value(), 1);
  EXPECT_EQ(runs_, 2);
  EXPECT_THROW((void)queued.get(), std::future_error);  // its promise died unkept
  gate_ = {};
}

TEST_F(SideWorkTest, RefusesWhatExceedsItsBound) {
  auto first = Start(Lane::kQuestions, 1, /*waits=*/true);
  for (std::size_t i = 1; i < SideWork::kMaxWaiting; ++i) {
    OnExecutor<SideWork::Ticket>([&] {
      return work_.Start<int>(
          Lane::kQuestions, "filling", executor_.Now() + 60s, [] { return Result<int>(0); },
          [](const Result<int>&) {});
    });
  }
  auto refused = Start(Lane::kQuestions, 2);
  EXPECT_THAT(Await(refused), IsStatus(Code::kResourceExhausted, Reason::kBusy));
  auto other = Start(Lane::kRegistrations, 3);
  EXPECT_EQ(Await(other).value(), 3);
}

TEST_F(SideWorkTest, CloseEndsWhatWaitsAndWhatComes) {
  auto running = Start(Lane::kQuestions, 1, /*waits=*/true);
  auto queued = Start(Lane::kQuestions, 2);
  const Status why(Code::kUnavailable, "the daemon stops", Reason::kNotRunning);
  OnExecutor<bool>([&] {
    work_.Close(why);
    return true;
  });
  auto late = Start(Lane::kRegistrations, 3);
  for (auto* future : {&running, &queued, &late}) {
    EXPECT_THAT(Await(*future), IsStatus(Code::kUnavailable, Reason::kNotRunning));
  }
}

}  // namespace
}  // namespace tensorbus::daemon
