#include "tensorbus/base/executor.h"

#include <future>
#include <vector>

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

using namespace std::chrono_literals;

TEST(ThreadExecutor, RunsTasksInOrderOnItsOwnThread) {
  ThreadExecutor executor("test");
  std::vector<int> order;
  std::promise<bool> done;
  for (int i = 0; i < 3; ++i) executor.Post([&order, i] { order.push_back(i); });
  executor.Post([&] { done.set_value(executor.RunningHere()); });
  EXPECT_TRUE(done.get_future().get());
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_FALSE(executor.RunningHere());
}

TEST(ThreadExecutor, TimersRunWhenDueAndEarlierFirst) {
  ThreadExecutor executor("test");
  std::vector<int> order;
  std::promise<void> done;
  const TimePoint now = executor.Now();
  executor.Post([&] {
    executor.PostAt(now + 20ms, [&] {
      order.push_back(2);
      done.set_value();
    });
    executor.PostAt(now + 10ms, [&] { order.push_back(1); });
  });
  done.get_future().get();
  EXPECT_GE(executor.Now(), now + 20ms);
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(ThreadExecutor, WhatStopDropsMayPostAsItGoes) {
  ThreadExecutor executor("test");
  const auto post = [&executor](void*) { executor.Post([] {}); };
  executor.PostAt(executor.Now() + std::chrono::hours(1),
                  [owned = std::shared_ptr<void>(nullptr, post)] {});
  executor.Stop();
}

TEST(ThreadExecutor, ACancelledTimerNeverRuns) {
  ThreadExecutor executor("test");
  std::promise<void> done;
  bool ran = false;
  executor.Post([&] {
    const auto timer = executor.PostAfter(1ms, [&] { ran = true; });
    executor.CancelTimer(timer);
    executor.CancelTimer(12345);
    executor.PostAfter(5ms, [&] { done.set_value(); });
  });
  done.get_future().get();
  EXPECT_FALSE(ran);
}

TEST(ThreadExecutor, StopDropsWhatIsQueued) {
  ThreadExecutor executor("test");
  bool ran = false;
  executor.PostAfter(1h, [&] { ran = true; });
  executor.Stop();
  executor.Post([&] { ran = true; });
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace tensorbus
