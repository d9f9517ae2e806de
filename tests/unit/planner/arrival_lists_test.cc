#include "planner/arrival_lists.h"

#include <gtest/gtest.h>
#include <random>

namespace tensorbus::planner {
namespace {

/// Lists that grow in turns, and beside each what it should hold.
class ArrivalListsTest : public ::testing::Test {
 protected:
  void Begin(std::size_t count) {
    numbers_.assign(count, lists_.Begin());
    expected_.assign(count, {});
  }
  void Add(std::size_t at, const Arrival& arrival) {
    numbers_[at] = lists_.Longer(numbers_[at], arrival);
    expected_[at].push_back(arrival);
  }
  std::vector<Arrival> Read(std::size_t at) const {
    std::vector<Arrival> arrivals;
    lists_.Read(numbers_[at], &arrivals);
    return arrivals;
  }

  ArrivalLists lists_;
  std::vector<std::uint32_t> numbers_;
  std::vector<std::vector<Arrival>> expected_;
};

TEST_F(ArrivalListsTest, NumbersAreEqualExactlyWhenListsAre) {
  std::mt19937_64 random(20'260'801);
  for (int round = 0; round < 200; ++round) {
    lists_.Clear();
    Begin(24);
    // Few arrivals, so that lists often stay alike for a while, part, and pass the same again.
    for (int i = 0; i < 100; ++i)
      Add(random() % 24,
          {static_cast<std::uint32_t>(random() % 2), static_cast<std::uint32_t>(random() % 2)});
    for (std::size_t a = 0; a < numbers_.size(); ++a) {
      EXPECT_EQ(Read(a), expected_[a]);
      for (std::size_t b = 0; b < a; ++b)
        ASSERT_EQ(numbers_[a] == numbers_[b], expected_[a] == expected_[b]);
    }
  }
}

TEST_F(ArrivalListsTest, ListsOfTwoBeginningsAreNeverOne) {
  const std::uint32_t one = lists_.Longer(lists_.Begin(), {1, 2});
  const std::uint32_t two = lists_.Longer(lists_.Begin(), {1, 2});
  EXPECT_NE(one, two);
  EXPECT_EQ(lists_.size(), 4U);
}

TEST_F(ArrivalListsTest, AListThatManyShareIsKeptOnce) {
  Begin(1'000);
  for (std::uint32_t route = 0; route < 10; ++route) {
    for (std::size_t at = 0; at < numbers_.size(); ++at) Add(at, {route, 7});
  }
  EXPECT_EQ(lists_.size(), 11U);
}

}  // namespace
}  // namespace tensorbus::planner
