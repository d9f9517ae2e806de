#include "planner/balance.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <set>

#include "planner/rounds.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::planner {
namespace {

using testing::IsStatus;

/// The bound by its definition: for every set of sources, what only they hold over their number.
std::uint64_t BoundBySubsets(const std::vector<Supply>& supplies, std::uint32_t sources) {
  std::uint64_t bound = 0;
  for (std::uint32_t set = 1; set < (1U << sources); ++set) {
    std::uint64_t bytes = 0;
    for (const Supply& supply : supplies) {
      const bool inside = std::all_of(supply.holders.begin(), supply.holders.end(),
                                      [set](std::uint32_t r) { return (set >> r & 1U) != 0; });
      bytes += inside ? supply.bytes : 0;
    }
    const auto size = static_cast<std::uint64_t>(__builtin_popcount(set));
    bound = std::max(bound, (bytes + size - 1) / size);
  }
  return bound;
}

std::vector<Supply> RandomSupplies(std::mt19937& rng, std::uint32_t sources) {
  std::vector<Supply> supplies(1 + rng() % 6);
  for (Supply& supply : supplies) {
    for (std::uint32_t r = 0; r < sources; ++r) {
      if (rng() % 2 == 0) supply.holders.push_back(r);
    }
    if (supply.holders.empty()) supply.holders.push_back(rng() % sources);
    supply.bytes = rng() % 1'000'000;
  }
  return supplies;
}

TEST(Balance, BoundIsExactAndSharesComeClose) {
  std::mt19937 rng(5);
  for (int round = 0; round < 500; ++round) {
    const std::uint32_t sources = 1 + rng() % 7;
    const std::vector<Supply> supplies = RandomSupplies(rng, sources);
    const std::uint64_t bound = BoundBySubsets(supplies, sources);
    ASSERT_EQ(MinMaxSend(supplies, sources), bound);
    const auto shares = Balance(supplies, sources);
    std::vector<std::uint64_t> loads(sources);
    for (std::size_t i = 0; i < supplies.size(); ++i) {
      ASSERT_EQ(std::accumulate(shares[i].begin(), shares[i].end(), std::uint64_t{0}),
                supplies[i].bytes);
      for (std::size_t k = 0; k < shares[i].size(); ++k)
        loads[supplies[i].holders[k]] += shares[i][k];
    }
    ASSERT_LE(*std::max_element(loads.begin(), loads.end()), bound + bound / 512);
  }
}

TEST(Balance, NothingToSendIsNoTrouble) {
  EXPECT_EQ(MinMaxSend({}, 3), 0U);
  EXPECT_TRUE(Balance({}, 3).empty());
  const std::vector<Supply> none = {{{0, 1}, 0}};
  EXPECT_EQ(MinMaxSend(none, 2), 0U);
}

TEST(AssignRounds, UsesAsFewRoundsAsAnySchedule) {
  std::mt19937 rng(6);
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t sources = 1 + rng() % 8;
    const std::uint32_t targets = 1 + rng() % 8;
    std::vector<Traffic> traffic;
    std::vector<std::uint32_t> degree(16);
    for (std::uint32_t s = 0; s < sources; ++s) {
      for (std::uint32_t t = 0; t < targets; ++t) {
        if (rng() % 3 == 0) continue;
        traffic.push_back({s, t, rng() % 100});
        ++degree[s];
        ++degree[8 + t];
      }
    }
    const std::vector<std::uint32_t> rounds = AssignRounds(traffic);
    std::set<std::pair<std::uint32_t, std::uint32_t>> busy;
    for (std::size_t i = 0; i < traffic.size(); ++i) {
      ASSERT_LT(rounds[i], *std::max_element(degree.begin(), degree.end()));
      ASSERT_TRUE(busy.emplace(traffic[i].source, rounds[i]).second);
      ASSERT_TRUE(busy.emplace(1000 + traffic[i].target, rounds[i]).second);
    }
  }
}

TEST(AssignRounds, OneBusyTargetAmongManyRanksNeedsNoHugeTable) {
  std::vector<Traffic> traffic;
  for (std::uint32_t s = 0; s < 60'000; ++s) traffic.push_back({s, 0, 1});
  const std::vector<std::uint32_t> rounds = AssignRounds(traffic);
  EXPECT_EQ(std::set<std::uint32_t>(rounds.begin(), rounds.end()).size(), traffic.size());
}

TEST(BalanceByNode, GivesWhatStaysOnItsNodeToThoseWithLittleToSendAfar) {
  const std::vector<Supply> far = {{{0}, 100}};
  const std::vector<Supply> near = {{{0, 1}, 100}};
  const NodeShares shares = BalanceByNode(far, near, 2);
  EXPECT_EQ(shares.far, (std::vector<std::vector<std::uint64_t>>{{100}}));
  EXPECT_EQ(shares.near, (std::vector<std::vector<std::uint64_t>>{{0, 100}}));
}

TEST(JoinSupplies, WhatExceedsTheLargestSumOfSuppliesJoinsNone) {
  std::uint64_t total = kMaxSupplyBytes - 12;
  EXPECT_THAT(JoinSupplies(4, 4, &total), IsStatus(Code::kResourceExhausted, Reason::kUnsupported));
  EXPECT_THAT(JoinSupplies(std::uint64_t{1} << 33, std::uint64_t{1} << 33, &total),
              IsStatus(Code::kResourceExhausted, Reason::kUnsupported));
  EXPECT_EQ(total, kMaxSupplyBytes - 12);
  ASSERT_OK_AND_ASSIGN(const std::uint64_t bytes, JoinSupplies(4, 3, &total));
  EXPECT_EQ(bytes, 12U);
  EXPECT_EQ(total, kMaxSupplyBytes);
}

}  // namespace
}  // namespace tensorbus::planner
