#include "planner/order_balance.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "tests/testing/status_matchers.h"

namespace tensorbus::planner {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

using Nodes = std::vector<std::vector<std::uint32_t>>;

/// What each target rank sends to other nodes when the trees of an order carry equal parts of its
/// share.
std::map<std::uint32_t, double> SentOut(const RelayTrees& trees,
                                        const std::vector<std::uint64_t>& shares) {
  std::map<std::uint32_t, double> sent;
  for (std::size_t order = 0; order < trees.orders(); ++order) {
    const double each = static_cast<double>(shares[order]) / static_cast<double>(trees.starts());
    const auto node_of = [&](std::uint32_t rank) {
      const auto holds = [rank](const auto& node) {
        return std::find(node.begin(), node.end(), rank) != node.end();
      };
      return std::find_if(trees.nodes().begin(), trees.nodes().end(), holds);
    };
    for (std::size_t start = 0; start < trees.starts(); ++start) {
      for (const RelayStep& step : trees.Steps(order * trees.starts() + start)) {
        if (step.hop == 0 || node_of(step.sender) == node_of(step.target)) continue;
        sent[step.sender] += each;
      }
    }
  }
  return sent;
}

TEST(OrderBalance, EqualNodesGetEqualShares) {
  OrderBalance balance(12);
  const RelayTrees trees({{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}}, false);
  EXPECT_THAT(balance.Share(trees, 3000), Each(1000));
  EXPECT_THAT(balance.Share(trees, 300), Each(100));
}

TEST(OrderBalance, OneOrderCarriesAll) {
  OrderBalance balance(3);
  EXPECT_THAT(balance.Share(RelayTrees({{0, 1, 2}}, false), 7), ElementsAre(7));
  EXPECT_THAT(balance.Share(RelayTrees({{0}, {1, 2}}, true), 9), ElementsAre(9));
}

TEST(OrderBalance, ANodeOfFewRanksIsSparedMore) {
  // Of 400 bytes, x leave the one rank and 400 - x the three of the other node: x = (400 - x) / 3.
  OrderBalance balance(4);
  const RelayTrees trees({{0}, {1, 2, 3}}, false);
  const std::vector<std::uint64_t> shares = balance.Share(trees, 400);
  EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), std::uint64_t{0}), 400U);
  const auto sent = SentOut(trees, shares);
  EXPECT_EQ(sent.size(), 4U);
  for (const auto& [rank, bytes] : sent) EXPECT_NEAR(bytes, 100, 1) << rank;
}

TEST(OrderBalance, ANodeThatMustPassOnOtherBytesIsSpared) {
  OrderBalance balance(4);
  const RelayTrees trees({{0, 1}, {2, 3}}, false);
  balance.CountRoot(RelayTrees({{0, 1}, {2, 3}}, true), 600);
  balance.CountRoot(RelayTrees({{2, 3}}, true), 5000);  // has nobody to pass them on to
  const std::vector<std::uint64_t> shares = balance.Share(trees, 1000);
  const auto sent = SentOut(trees, shares);
  EXPECT_NEAR(sent.at(0) + 300, 400, 1);
  EXPECT_NEAR(sent.at(2), 400, 1);
}

TEST(OrderBalance, TakesTheLargestTransfer) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 61;
  OrderBalance balance(5);
  const RelayTrees trees({{0, 1}, {2}, {3, 4}}, false);
  for (int i = 0; i < 2; ++i) {
    const std::vector<std::uint64_t> shares = balance.Share(trees, kBytes);
    EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), std::uint64_t{0}), kBytes);
  }
  EXPECT_EQ(balance.Share(trees, 0), std::vector<std::uint64_t>(3));
}

}  // namespace
}  // namespace tensorbus::planner
