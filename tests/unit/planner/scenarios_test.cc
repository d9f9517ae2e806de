// Every scenario that is shipped against the byte figures that three independent programs computed.

#include <fstream>

#include <nlohmann/json.hpp>

#include "planner/topology.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/checked_plan.h"
#include "tests/unit/planner/shipped_scenario.h"

namespace tensorbus::planner {
namespace {

using Json = nlohmann::json;
using Bytes = std::vector<std::uint64_t>;

class Scenarios : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(ShippedScenario scenario, LoadScenario(TENSORBUS_MANIFESTS, GetParam()));
    source = std::move(scenario.source);
    target = std::move(scenario.target);
    topology = DefaultTopology(source.rank_count, target.rank_count, scenario.colocated);
    std::ifstream file(TENSORBUS_MANIFESTS "/expected_bytes.json");
    want = Json::parse(file).at(scenario.id);
  }

  JobLayout source;
  JobLayout target;
  Topology topology;
  Json want;
};

std::uint64_t MaxOf(const Bytes& bytes) {
  return bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
}

TEST_P(Scenarios, AgreeWithTheReferenceFigures) {
  ASSERT_OK_AND_ASSIGN(const CheckedPlan made, MakeCheckedPlan(source, target, topology));
  const auto& [plan, certificate, figures] = made;

  EXPECT_EQ(source.rank_count, want["source_world"]);
  EXPECT_EQ(target.rank_count, want["target_world"]);
  EXPECT_EQ(target.tensors.size(), want["tensors"]);
  EXPECT_EQ(figures.unique_bytes, want["unique_bytes"]);
  EXPECT_EQ(figures.recv_bytes, want["recv_min"].get<Bytes>());
  EXPECT_EQ(figures.local_bytes, want["local_bytes"].get<Bytes>());
  std::uint64_t arrived = 0;
  for (std::size_t t = 0; t < figures.recv_bytes.size(); ++t)
    arrived += figures.recv_bytes[t] + figures.local_bytes[t];
  EXPECT_EQ(certificate.bytes, arrived);

  // Every source sends what only it has, and the busiest hardly more than it must.
  const Bytes exclusive = want["send_exclusive_p2p"].get<Bytes>();
  ASSERT_EQ(figures.send_bytes.size(), exclusive.size());
  for (std::size_t s = 0; s < exclusive.size(); ++s)
    EXPECT_GE(figures.send_bytes[s], exclusive[s]) << "source " << s;
  const double least =
      want["send_minmax_p2p"][0].get<double>() / want["send_minmax_p2p"][1].get<double>();
  const auto busiest =
      static_cast<double>(*std::max_element(figures.send_bytes.begin(), figures.send_bytes.end()));
  EXPECT_GE(busiest, least * (1 - 1e-12));
  constexpr double kCutBytes = 64 << 10;  // boxes are cut in steps of about this
  EXPECT_LE(busiest, least * 1.02 + kCutBytes);
  const Bytes node_in = want["node_in_min"].get<Bytes>();
  ASSERT_EQ(figures.node_in_bytes.size(), node_in.size());
  for (std::size_t n = 0; n < node_in.size(); ++n) EXPECT_GE(figures.node_in_bytes[n], node_in[n]);
}

TEST_P(Scenarios, WithRelaysEachByteIsSentAboutOnce) {
  ASSERT_OK_AND_ASSIGN(const CheckedPlan made,
                       MakeCheckedPlan(source, target, topology, {.relays = true}));
  const PlanFigures& figures = made.figures;
  const double least =
      want["send_minmax_once"][0].get<double>() / want["send_minmax_once"][1].get<double>();
  EXPECT_LE(static_cast<double>(MaxOf(figures.send_bytes)), least * 1.05 + 1e-6);
  const Bytes node_in = want["node_in_min"].get<Bytes>();
  ASSERT_EQ(figures.node_in_bytes.size(), node_in.size());
  for (std::size_t n = 0; n < node_in.size(); ++n)
    EXPECT_LE(figures.node_in_bytes[n] * 100, node_in[n] * 102) << "node " << n;
  EXPECT_LE(figures.max_send_bytes * 10, MaxOf(figures.recv_bytes) * 11);
}

std::vector<std::string> Ids(char letter, int count) {
  std::vector<std::string> ids;
  for (int i = 1; i <= count; ++i)
    ids.push_back(std::string(1, letter) + (i < 10 ? "0" : "") + std::to_string(i));
  return ids;
}

INSTANTIATE_TEST_SUITE_P(Tiny, Scenarios, ::testing::ValuesIn(Ids('T', 13)),
                         [](const auto& given) { return given.param; });
INSTANTIATE_TEST_SUITE_P(Published, Scenarios, ::testing::ValuesIn(Ids('S', 16)),
                         [](const auto& given) { return given.param; });

}  // namespace
}  // namespace tensorbus::planner
