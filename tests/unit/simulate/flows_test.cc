// The simulator against cases whose answer is known in closed form.

#include "simulate/flows.h"

#include <array>
#include <random>

#include "tests/testing/status_matchers.h"

namespace tensorbus::simulate {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

constexpr double kExact = 1e-9;

Flow Plain(std::vector<std::uint32_t> links, double bytes) {
  Flow flow;
  for (const std::uint32_t link : links) flow.hops.push_back({link, 1});
  flow.bytes = bytes;
  return flow;
}

Flow Relay(std::vector<std::uint32_t> links, double bytes, double window, std::vector<Feed> feeds) {
  Flow flow = Plain(std::move(links), bytes);
  flow.window_bytes = window;
  flow.feeds = std::move(feeds);
  return flow;
}

std::vector<Allotment> SharesOf(std::span<const Demand> demands, std::span<const double> links) {
  MaxMinShares sharing(demands, links);
  const auto shares = sharing.Run();
  return {shares.begin(), shares.end()};
}

TEST(MaxMinShares, GivesTheTextbookAnswer) {
  // Links 10 and 4; flows over the first, over both, over the second: 8, 2, 2.
  const std::array<Hop, 2> both = {Hop{0, 1}, Hop{1, 1}};
  const std::array<Demand, 3> demands = {Demand{std::span(both).first(1)}, Demand{both},
                                         Demand{std::span(both).subspan(1)}};
  const std::array<double, 2> links = {10, 4};
  const auto shares = SharesOf(demands, links);
  EXPECT_THAT(shares[0].rate, DoubleNear(8, kExact));
  EXPECT_THAT(shares[1].rate, DoubleNear(2, kExact));
  EXPECT_THAT(shares[2].rate, DoubleNear(2, kExact));
  EXPECT_EQ(shares[0].link, 0U);
  EXPECT_EQ(shares[1].link, 1U);
}

TEST(MaxMinShares, MindsWeightsCostsAndCaps) {
  const std::array<Hop, 1> link = {Hop{0, 1}};
  const std::array<Hop, 1> dear = {Hop{0, 2}};
  const std::array<double, 1> links = {12};
  const std::array<Demand, 2> weighted = {Demand{link, 1}, Demand{link, 3}};
  EXPECT_THAT(SharesOf(weighted, links)[1].rate, DoubleNear(9, kExact));
  const std::array<Demand, 2> costly = {Demand{link, 1}, Demand{dear, 1}};
  EXPECT_THAT(SharesOf(costly, links)[0].rate, DoubleNear(4, kExact));
  const std::array<Demand, 2> capped = {Demand{link, 1, 2}, Demand{link, 1}};
  EXPECT_THAT(SharesOf(capped, links)[1].rate, DoubleNear(10, kExact));
  EXPECT_EQ(SharesOf(capped, links)[0].link, kNoLink);
}

/// What makes a share max-min fair: no link is overfull, and every flow has a full link on which
/// nobody has a larger share (or has reached its cap).
TEST(MaxMinShares, IsFairOnRandomNetworks) {
  std::minstd_rand random(1);
  const auto upto = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    std::vector<double> links(1 + upto(6));
    for (double& link : links) link = 1 + upto(20);
    std::vector<std::vector<Hop>> hops(1 + upto(12));
    std::vector<Demand> demands;
    for (auto& path : hops) {
      for (std::uint32_t l = 0; l < links.size(); ++l) {
        if (upto(2) == 0) path.push_back({l, 1.0 + upto(3)});
      }
      if (path.empty()) path.push_back({0, 1});
      demands.push_back({path, 1.0 + upto(1000),
                         upto(4) == 0 ? 1.0 + upto(5) : std::numeric_limits<double>::infinity()});
    }
    const auto shares = SharesOf(demands, links);
    std::vector<double> used(links.size());
    for (std::size_t f = 0; f < demands.size(); ++f) {
      for (const Hop& hop : demands[f].hops) used[hop.link] += hop.cost * shares[f].rate;
    }
    for (std::size_t l = 0; l < links.size(); ++l) ASSERT_LE(used[l], links[l] * (1 + 1e-9));
    for (std::size_t f = 0; f < demands.size(); ++f) {
      if (shares[f].link == kNoLink) {
        ASSERT_THAT(shares[f].rate, DoubleNear(demands[f].cap, 1e-6));
        continue;
      }
      ASSERT_THAT(used[shares[f].link], DoubleNear(links[shares[f].link], 1e-6)) << round;
      for (std::size_t other = 0; other < demands.size(); ++other) {
        for (const Hop& hop : demands[other].hops) {
          if (hop.link != shares[f].link) continue;
          ASSERT_LE(shares[other].rate / demands[other].weight,
                    shares[f].rate / demands[f].weight * (1 + 1e-6));
        }
      }
    }
  }
}

TEST(MaxMinShares, RunAgainGoesByTheNewCaps) {
  const std::array<Hop, 1> link = {Hop{0, 1}};
  const std::array<double, 1> links = {12};
  std::array<Demand, 3> demands = {Demand{link, 1, 2}, Demand{link, 1, 5}, Demand{link, 1}};
  MaxMinShares sharing(demands, links);
  const auto rates = [&] {
    std::vector<double> list;
    for (const Allotment& share : sharing.Run()) list.push_back(share.rate);
    return list;
  };
  EXPECT_THAT(rates(),
              ElementsAre(DoubleNear(2, kExact), DoubleNear(5, kExact), DoubleNear(5, kExact)));
  demands[0].cap = 8;
  demands[1].cap = 3;
  EXPECT_THAT(rates(),
              ElementsAre(DoubleNear(4.5, kExact), DoubleNear(3, kExact), DoubleNear(4.5, kExact)));
}

TEST(RunFlows, OneLinkTakesBytesOverRate) {
  const std::array<double, 1> links = {50};
  ASSERT_OK_AND_ASSIGN(const FlowOutcome out, RunFlows(std::vector{Plain({0}, 1000)}, links));
  EXPECT_THAT(out.end_s, DoubleNear(20, kExact));
  EXPECT_EQ(out.times[0].link, 0U);
  ASSERT_EQ(out.stretches.size(), 1U);
  EXPECT_THAT(out.stretches[0].used[0], DoubleNear(50, kExact));
}

TEST(RunFlows, TwoFlowsShareALink) {
  const std::array<double, 1> links = {10};
  const std::vector<Flow> flows = {Plain({0}, 100), Plain({0}, 300)};
  // Equally: the short one ends when both have sent 100, the long one when all is through.
  ASSERT_OK_AND_ASSIGN(const FlowOutcome equal,
                       RunFlows(flows, links, {.sharing = Sharing::kEqual}));
  EXPECT_THAT(equal.times[0].end_s, DoubleNear(20, kExact));
  EXPECT_THAT(equal.times[1].end_s, DoubleNear(40, kExact));
  // By what is left: both at the end.
  ASSERT_OK_AND_ASSIGN(const FlowOutcome left, RunFlows(flows, links));
  EXPECT_THAT(left.times[0].end_s, DoubleNear(40, kExact));
  EXPECT_THAT(left.times[1].end_s, DoubleNear(40, kExact));
}

TEST(RunFlows, IncastIsHeldByTheReceiver) {
  // Links 0 to 7 leave the senders, link 8 leads into the receiver.
  std::vector<double> links(8, 100.0);
  links.push_back(50);
  std::vector<Flow> flows;
  for (std::uint32_t s = 0; s < 8; ++s) flows.push_back(Plain({s, 8}, 100 * (s + 1)));
  for (const Sharing sharing : {Sharing::kRemaining, Sharing::kEqual}) {
    ASSERT_OK_AND_ASSIGN(const FlowOutcome out, RunFlows(flows, links, {.sharing = sharing}));
    EXPECT_THAT(out.end_s, DoubleNear(3600.0 / 50, 1e-6));
    EXPECT_EQ(out.times[7].link, 8U);
  }
}

TEST(RunFlows, SharingByNeedReachesTheBoundThatEqualSharingMisses) {
  // Source 0 has 90 for each of two targets; four small sources have 10 for each. Shared equally,
  // the small ones slow source 0 down at the targets first, and it has to catch up alone.
  std::vector<double> links(5 + 2, 10.0);
  std::vector<Flow> flows;
  for (std::uint32_t t = 0; t < 2; ++t) {
    flows.push_back(Plain({0, 5 + t}, 90));
    for (std::uint32_t s = 1; s < 5; ++s) flows.push_back(Plain({s, 5 + t}, 10));
  }
  ASSERT_OK_AND_ASSIGN(const FlowOutcome need, RunFlows(flows, links));
  EXPECT_THAT(need.end_s, DoubleNear(18, 1e-6));  // 180 bytes leave source 0
  ASSERT_OK_AND_ASSIGN(const FlowOutcome equal,
                       RunFlows(flows, links, {.sharing = Sharing::kEqual}));
  // For 5 s everybody has 2; then source 0 has 160 left.
  EXPECT_THAT(equal.end_s, DoubleNear(5 + 160.0 / 10, 1e-6));
}

TEST(RunFlows, RoundsGoOneAfterTheOther) {
  std::vector<Flow> flows = {Plain({0}, 100), Plain({0}, 50), Plain({1}, 30)};
  flows[0].round = 1;  // sender 0 sends flow 1 first
  flows[1].receiver = 1;
  flows[2].sender = 1;
  flows[2].receiver = 2;
  const std::array<double, 2> links = {10, 10};
  ASSERT_OK_AND_ASSIGN(const FlowOutcome out,
                       RunFlows(flows, links, {.sharing = Sharing::kRounds}));
  EXPECT_THAT(out.times[1].end_s, DoubleNear(5, kExact));
  EXPECT_THAT(out.times[0].start_s, DoubleNear(5, kExact));
  EXPECT_THAT(out.times[0].end_s, DoubleNear(15, kExact));
  EXPECT_THAT(out.times[2].end_s, DoubleNear(3, kExact));
}

/// A chain of h links, each hop passing on window by window: bytes/rate, and a window/rate more for
/// every hop after the first.
TEST(RunFlows, AChainIsPipelinedByWindow) {
  const double bytes = 1000;
  const double window = 50;
  const double rate = 10;
  for (const std::uint32_t hops : {1U, 2U, 3U, 5U}) {
    std::vector<Flow> flows = {Plain({0}, bytes)};
    for (std::uint32_t h = 1; h < hops; ++h)
      flows.push_back(Relay({h}, bytes, window, {{h - 1, bytes}}));
    const std::vector<double> links(hops, rate);
    ASSERT_OK_AND_ASSIGN(const FlowOutcome out, RunFlows(flows, links));
    EXPECT_THAT(out.end_s, DoubleNear(bytes / rate + (hops - 1) * window / rate, 1e-6)) << hops;
    EXPECT_THAT(out.times[hops - 1].start_s, DoubleNear((hops - 1) * window / rate, 1e-6));
  }
}

TEST(RunFlows, ASlowRelayDecides) {
  // The second link is half as fast: first window, then all bytes at its own rate.
  const std::vector<Flow> flows = {Plain({0}, 1000), Relay({1}, 1000, 50, {{0, 1000}})};
  const std::array<double, 2> links = {10, 5};
  ASSERT_OK_AND_ASSIGN(const FlowOutcome out, RunFlows(flows, links));
  EXPECT_THAT(out.end_s, DoubleNear(5 + 200, 1e-6));
  EXPECT_EQ(out.times[1].link, 1U);
}

TEST(RunFlows, ARelayThatHasCaughtUpGoesAsFastAsWhatFeedsIt) {
  // Two flows bring halves over one link; the relay's own link is ten times as fast.
  const std::vector<Flow> flows = {Plain({0}, 500), Plain({0}, 500),
                                   Relay({1}, 1000, 10, {{0, 500}, {1, 500}})};
  const std::array<double, 2> links = {10, 100};
  ASSERT_OK_AND_ASSIGN(const FlowOutcome out, RunFlows(flows, links));
  EXPECT_THAT(out.end_s, DoubleNear(100 + 10.0 / 100, 1e-6));
}

TEST(RunFlows, SendsNothingBeforeItHasArrived) {
  // A relay on a link of its own, fed by a flow that shares one with a stranger.
  const std::vector<Flow> flows = {Plain({0}, 100), Plain({0}, 900),
                                   Relay({1}, 100, 20, {{0, 100}})};
  const std::array<double, 2> links = {10, 1000};
  ASSERT_OK_AND_ASSIGN(const FlowOutcome out, RunFlows(flows, links, {.sharing = Sharing::kEqual}));
  EXPECT_THAT(out.times[0].end_s, DoubleNear(20, 1e-6));
  EXPECT_THAT(out.times[2].start_s, DoubleNear(4, 1e-6));
  EXPECT_THAT(out.times[2].end_s, DoubleNear(20 + 20.0 / 1000, 1e-6));
}

TEST(RunFlows, ManyFlowsThatEndOneByOneStayWithinTheGrain) {
  std::vector<Flow> flows;
  double sum = 0;
  for (int i = 1; i <= 3000; ++i) {
    flows.push_back(Plain({0}, i));
    sum += i;
  }
  const std::array<double, 1> links = {100};
  ASSERT_OK_AND_ASSIGN(const FlowOutcome out, RunFlows(flows, links, {.sharing = Sharing::kEqual}));
  EXPECT_LT(out.stretches.size(), 1100U);
  EXPECT_THAT(out.end_s, DoubleNear(sum / 100, sum / 100 * 2e-3));
}

TEST(RunFlows, SaysSoWhenNothingCanMove) {
  // A relay fed by itself.
  const std::array<double, 1> links = {10};
  EXPECT_THAT(RunFlows(std::vector{Relay({0}, 10, 1, {{0, 10}})}, links),
              testing::IsStatus(Code::kInternal, Reason::kNone));
  ASSERT_OK_AND_ASSIGN(const FlowOutcome none, RunFlows({}, links));
  EXPECT_EQ(none.end_s, 0);
  ASSERT_OK_AND_ASSIGN(const FlowOutcome empty, RunFlows(std::vector{Plain({0}, 0)}, links));
  EXPECT_EQ(empty.end_s, 0);
}

}  // namespace
}  // namespace tensorbus::simulate
