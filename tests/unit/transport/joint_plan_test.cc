#include "tensorbus/transport/joint_plan.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <set>

#include "tensorbus/kernels/joint_copy.h"
#include "tests/testing/random_blocks.h"

namespace tensorbus::transport {
namespace {

using testing::Pick;
using testing::Random;

/// Addresses only: nothing is read.
std::byte* At(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

StridedBlock Rows(std::uint64_t address, std::uint64_t rows, std::uint64_t bytes,
                  std::uint64_t pitch) {
  StridedBlock block;
  block.base = At(address);
  block.rank = 2;
  block.extents = {rows, bytes};
  block.strides = {pitch, 1};
  return block;
}

/// `count` targets of equal columns of `rows` rows at `address`.
struct Columns {
  Columns(std::uint64_t address, std::uint64_t rows, std::uint64_t bytes, std::size_t count)
      : sources(count), targets(count) {
    for (std::size_t i = 0; i < count; ++i) {
      sources[i].blocks.push_back(Rows(address + i * bytes, rows, bytes, bytes * count));
      targets[i].blocks.push_back(Rows(0x10000000 * (i + 1), rows, bytes, bytes));
    }
  }
  std::vector<JointPlan::Route> Routes() const {
    std::vector<JointPlan::Route> routes;
    for (std::size_t i = 0; i < sources.size(); ++i) routes.push_back({&sources[i], &targets[i]});
    return routes;
  }
  std::vector<RouteEnd> sources;
  std::vector<RouteEnd> targets;
};

/// Every byte of every block in exactly one item, in ascending order, no part empty.
void ExpectCovers(const JointPlan& plan, const std::vector<JointPlan::Route>& routes) {
  std::vector<std::vector<std::uint64_t>> reached;
  for (const auto& route : routes) reached.emplace_back(route.source->blocks.size());
  std::size_t next = 0;
  for (std::size_t p = 0; p < plan.size(); ++p) {
    const auto [first, last] = plan.part(p);
    ASSERT_EQ(first, next);
    ASSERT_LT(first, last);
    next = last;
    for (std::size_t s = first; s < last; ++s) {
      ASSERT_FALSE(plan.slice(s).empty());
      ASSERT_LE(plan.slice(s).size(), kernels::kJointMax);
      for (const JointPlan::Item& item : plan.slice(s)) {
        ASSERT_GT(item.part.range.count, 0U);
        ASSERT_EQ(item.part.range.first, reached[item.route][item.part.block]);
        reached[item.route][item.part.block] += item.part.range.count;
      }
    }
  }
  for (std::size_t r = 0; r < routes.size(); ++r) {
    for (std::size_t b = 0; b < reached[r].size(); ++b) {
      ASSERT_EQ(reached[r][b], routes[r].source->blocks[b].bytes());
    }
  }
}

TEST(JointPlan, CoversEveryByteOnce) {
  Random random(61);
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(round);
    std::vector<RouteEnd> sources(Pick(random, 1, 20));
    std::vector<RouteEnd> targets(sources.size());
    std::vector<JointPlan::Route> routes;
    for (std::size_t r = 0; r < sources.size(); ++r) {
      const std::uint64_t blocks = Pick(random, 0, 60);
      for (std::uint32_t b = 0; b < blocks; ++b) {
        const std::uint64_t bytes = Pick(random, 1, round % 2 == 0 ? 9 : 900);
        const std::uint64_t rows = Pick(random, 0, 9);
        const std::uint64_t pitch = bytes + Pick(random, 0, 900);
        sources[r].blocks.push_back(Rows(Pick(random, 4096, 300000), rows, bytes, pitch));
        targets[r].blocks.push_back(Rows(4096, rows, bytes, bytes + Pick(random, 0, 1)));
        if (Pick(random, 0, 9) == 0) targets[r].aliases.push_back({.block = b, .place = {}});
      }
      routes.push_back({&sources[r], &targets[r]});
    }
    ExpectCovers(JointPlan(routes, Pick(random, 1, 3000)), routes);
  }
}

TEST(JointPlan, PutsColumnsOfTheSameRowsIntoOneSlice) {
  const Columns columns(0x100000, 64, 1000, 3);
  const auto routes = columns.Routes();
  const JointPlan plan(routes, 30'000);
  ExpectCovers(plan, routes);
  ASSERT_EQ(plan.size(), 7U);  // 192,000 bytes
  for (std::size_t p = 0; p < plan.size(); ++p) {
    const auto [first, last] = plan.part(p);
    ASSERT_EQ(last, first + 1);
    const auto slice = plan.slice(first);
    ASSERT_EQ(slice.size(), 3U);
    for (const JointPlan::Item& item : slice) {
      EXPECT_EQ(item.part.range.first, slice[0].part.range.first) << "other rows";
      EXPECT_EQ(item.part.range.first % 1000, 0U) << "inside a row";
    }
  }
}

TEST(JointPlan, PutsReplicasOfOneShardIntoOneSlice) {
  Columns columns(0x100000, 1, 9000, 1);
  columns.sources.push_back(columns.sources[0]);
  columns.targets.push_back(columns.targets[0]);
  const JointPlan plan(columns.Routes(), 1 << 20);
  ASSERT_EQ(plan.size(), 1U);
  EXPECT_EQ(plan.slice(0).size(), 2U);
}

TEST(JointPlan, LeavesApartWhatLiesApart) {
  Columns columns(0x100000, 4, 100, 1);
  columns.sources.push_back(columns.sources[0]);
  columns.targets.push_back(columns.targets[0]);
  columns.sources[1].blocks[0].base = At(0x100000 + 400);
  const JointPlan plan(columns.Routes(), 1 << 20);
  ASSERT_EQ(plan.size(), 1U) << "small ones still share a part";
  const auto [first, last] = plan.part(0);
  EXPECT_EQ(last - first, 2U);
}

TEST(JointPlan, LeavesABlockWithAliasesToItself) {
  Columns columns(0x100000, 4, 100, 3);
  columns.targets[1].aliases.push_back({.block = 0, .place = {}});
  const JointPlan plan(columns.Routes(), 1 << 20);
  const auto [first, last] = plan.part(0);
  for (std::size_t s = first; s < last; ++s) {
    const auto slice = plan.slice(s);
    const bool aliased = std::any_of(slice.begin(), slice.end(),
                                     [](const JointPlan::Item& item) { return item.route == 1; });
    EXPECT_TRUE(!aliased || slice.size() == 1);
  }
}

}  // namespace
}  // namespace tensorbus::transport
