#include "simulate/predict.h"

#include <cmath>

#include "tensorbus/formats/cluster_file.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::simulate {
namespace {

using planner::JobOf;
using planner::MakeShape;
using ::testing::DoubleNear;
using ::testing::HasSubstr;
using testing::IsStatus;

Cluster Shipped(const std::string& name) {
  return formats::ReadCluster(TENSORBUS_CLUSTERS "/" + name + ".json").value();
}

/// One f32 tensor of `rows` rows of 1024, whole on every rank.
JobLayout Whole(std::uint32_t ranks, std::uint64_t rows) {
  const Shape shape = MakeShape({rows, 1024});
  Holding holding;
  for (std::uint32_t r = 0; r < ranks; ++r) holding.ranks.push_back({r, {Box::Whole(shape)}});
  return JobOf(ranks, {{"w", DType::kF32, shape}}, std::move(holding));
}

/// The same, rows split evenly.
JobLayout Rows(std::uint32_t ranks, std::uint64_t rows) {
  const Shape shape = MakeShape({rows, 1024});
  Holding holding;
  for (std::uint32_t r = 0; r < ranks; ++r) {
    Box box = Box::Whole(shape);
    box[0] = {rows / ranks * r, rows / ranks * (r + 1)};
    holding.ranks.push_back({r, {box}});
  }
  return JobOf(ranks, {{"w", DType::kF32, shape}}, std::move(holding));
}

constexpr std::uint64_t kRows = 1 << 18;  // 1 GiB of f32
constexpr double kBytes = kRows * 1024.0 * 4.0;

struct Case {
  Prediction prediction;
  planner::PlanFigures figures;
};

Case PredictOn(const Cluster& cluster, const JobLayout& source, const JobLayout& target,
               bool colocated = false) {
  const Seating seating =
      SeatRanks(cluster, source.rank_count, target.rank_count, colocated).value();
  const planner::Topology topology = TopologyOf(cluster, seating);
  const planner::Plan plan = planner::BuildPlan(source, target, topology).value();
  Case made;
  made.figures = planner::FiguresOf(source, target, topology, plan).value();
  made.prediction = Predict(cluster, seating, {plan, target, made.figures, {}}).value();
  return made;
}

/// A source in the target's rack and one in another: only what the far one alone holds needs a NIC.
TEST(Predict, BytesInsideADomainDoNotCountForTheNic) {
  Cluster cluster = Shipped("gb200-nvl72");
  cluster.source_seats = {{0, 0}, {18, 0}};
  cluster.target_seats = {{0, 1}};
  const JobLayout source = Rows(2, 1 << 18);
  const JobLayout target = Whole(1, 1 << 18);
  const Seating seating = SeatRanks(cluster, 2, 1, false).value();
  const planner::Topology topology = TopologyOf(cluster, seating);
  ASSERT_OK_AND_ASSIGN(const std::uint64_t far_bytes,
                       planner::LeastPortBytes(source, target, topology));
  EXPECT_EQ(far_bytes, std::uint64_t{1} << 29);  // half of the tensor
  const planner::Plan plan = planner::BuildPlan(source, target, topology).value();
  const planner::PlanFigures figures = planner::FiguresOf(source, target, topology, plan).value();
  ASSERT_OK_AND_ASSIGN(const Prediction made,
                       Predict(cluster, seating, {plan, target, figures, {}, far_bytes}));
  EXPECT_EQ(made.bounds[0].name, "receive");
  EXPECT_THAT(made.bounds[0].seconds, DoubleNear(static_cast<double>(far_bytes) / 50e9, 1e-12));
  EXPECT_EQ(made.bounds[1].name, "rank");
  EXPECT_THAT(made.bounds[1].seconds, DoubleNear(static_cast<double>(far_bytes) / 50e9, 1e-12));
  EXPECT_LE(made.seconds, made.bounds[0].seconds * 1.05);
}

/// Relays on two nodes whose chains feed each other.
TEST(Predict, RelaysOnTwoNodesAreBoundByWhatEntersOverEachRail) {
  const Cluster cluster = Shipped("h100-8x400g");
  const JobLayout source = Rows(8, kRows);
  const JobLayout target = Whole(16, kRows);
  const Seating seating = SeatRanks(cluster, 8, 16, false).value();
  const planner::Topology topology = TopologyOf(cluster, seating);
  const planner::Plan plan =
      planner::BuildPlan(source, target, topology, nullptr, {.relays = true}).value();
  const planner::PlanFigures figures = planner::FiguresOf(source, target, topology, plan).value();
  ASSERT_OK_AND_ASSIGN(const std::uint64_t far_bytes,
                       planner::LeastPortBytes(source, target, topology, {.relays = true}));
  EXPECT_EQ(far_bytes, static_cast<std::uint64_t>(kBytes) / 8);
  ASSERT_OK_AND_ASSIGN(const Prediction made,
                       Predict(cluster, seating, {plan, target, figures, {}, far_bytes}));
  EXPECT_EQ(made.bounds[0].name, "rank");
  EXPECT_THAT(made.bounds[0].seconds, DoubleNear(kBytes / 8 / 50e9, 1e-9));
  EXPECT_GE(made.seconds, made.bounds[0].seconds);
  // Nine hops follow each other by a window of 16 MiB; each rank gets 128 MiB over its NIC.
  EXPECT_LE(made.seconds, made.bounds[0].seconds * 2.2);
}

/// Bytes over a port, with what each message costs.
double Over(const PortSpeed& port, double bytes, std::uint64_t window) {
  return bytes / port.bytes_per_s + std::ceil(bytes / static_cast<double>(window)) * port.message_s;
}

TEST(Predict, OneRankToAnotherTakesTheNic) {
  const Cluster cluster = Shipped("h100-8x400g");
  const Case made = PredictOn(cluster, Whole(1, kRows), Whole(1, kRows));
  EXPECT_THAT(made.prediction.seconds,
              DoubleNear(Over(cluster.nic, kBytes, cluster.window_bytes), 1e-9));
  EXPECT_THAT(made.prediction.busiest, HasSubstr("rail 0 nic"));
  EXPECT_EQ(made.prediction.wire_bytes, kBytes);
  ASSERT_EQ(made.prediction.critical_path.size(), 1U);
  EXPECT_EQ(made.prediction.critical_path[0].to, "target 0");
  ASSERT_EQ(made.prediction.bounds.size(), 4U);
  EXPECT_EQ(made.prediction.bounds[0].name, "receive");
  EXPECT_THAT(made.prediction.bounds[0].seconds, DoubleNear(kBytes / 50e9, 1e-12));
  EXPECT_EQ(made.prediction.bounds[1].name, "rank");
  EXPECT_THAT(made.prediction.bounds[1].seconds, DoubleNear(kBytes / 50e9, 1e-12));
  EXPECT_EQ(made.prediction.bounds[2].name, "node_in");
  EXPECT_THAT(made.prediction.bounds[2].seconds, DoubleNear(kBytes / 400e9, 1e-12));
  // Eight ranks to eight, each pair exchanging an eighth: every rail carries an eighth of all.
  const Case rows = PredictOn(cluster, Rows(8, kRows), Rows(8, kRows));
  EXPECT_THAT(rows.prediction.seconds,
              DoubleNear(Over(cluster.nic, kBytes / 8, cluster.window_bytes), 1e-9));
}

TEST(Predict, ASlowBusHoldsTheNicBack) {
  Cluster cluster = Shipped("h100-8x400g");
  cluster.pcie.bytes_per_s = 20e9;
  const Case made = PredictOn(cluster, Whole(1, kRows), Whole(1, kRows));
  EXPECT_THAT(made.prediction.seconds, DoubleNear(kBytes / 20e9, 1e-6));
  EXPECT_THAT(made.prediction.bounds[0].seconds, DoubleNear(kBytes / 20e9, 1e-9));
  EXPECT_THAT(made.prediction.busiest, HasSubstr("pcie"));
}

TEST(Predict, ColocatedBytesAreCopiedInMemory) {
  const Cluster cluster = Shipped("h100-8x400g");
  const Case made = PredictOn(cluster, Rows(2, kRows), Rows(2, kRows), true);
  EXPECT_EQ(made.figures.recv_bytes, (std::vector<std::uint64_t>{0, 0}));
  EXPECT_THAT(made.prediction.seconds, DoubleNear(2 * kBytes / 2 / 3350e9, 1e-9));
  EXPECT_EQ(made.prediction.wire_bytes, 0);
}

TEST(Predict, ARackOfNvlinkIsOneNode) {
  const Cluster cluster = Shipped("gb200-nvl72");
  // Source on tray 0, target on tray 1 of the same rack.
  const Case made = PredictOn(cluster, Whole(1, kRows), Whole(1, kRows));
  EXPECT_EQ(made.figures.node_in_bytes, (std::vector<std::uint64_t>{0}));
  EXPECT_THAT(made.prediction.seconds,
              DoubleNear(Over(cluster.nvlink, kBytes, cluster.window_bytes), 1e-9));
  // 72 sources fill the rack, the target is in the next.
  const Case next = PredictOn(cluster, Whole(72, kRows), Whole(1, kRows));
  EXPECT_THAT(next.prediction.seconds, DoubleNear(kBytes / 50e9, kBytes / 50e9 * 0.05));
}

TEST(Predict, TwoHostsShareOneWire) {
  const Cluster cluster = Shipped("tcp-pair");
  const Case made = PredictOn(cluster, Rows(4, kRows), Rows(2, kRows));
  EXPECT_THAT(made.prediction.seconds,
              DoubleNear(Over(cluster.nic, kBytes, cluster.window_bytes), 1e-3));
  EXPECT_THAT(made.prediction.busiest, HasSubstr("nic"));
}

/// A plan by hand: the source sends all of it to target 0, which passes it on to target 1 on the
/// same node and target 2 on another.
TEST(Predict, RelaysArePipelined) {
  const Cluster cluster = Shipped("h100-8x400g");
  const JobLayout source = Whole(1, kRows);
  const JobLayout target = Whole(9, kRows);
  planner::Plan plan;
  plan.boxes = {Box::Whole(source.tensors[0].spec.shape)};
  plan.ops = {{0, 0}, {0, 0}, {0, 0}};
  const auto bytes = static_cast<std::uint64_t>(kBytes);
  plan.routes = {{0, 0, 0, 1, bytes, false, false, 0},
                 {0, 1, 1, 1, bytes, false, true, 1},
                 {1, 8, 2, 1, bytes, false, true, 2}};
  plan.round_count = 3;
  const Seating seating = SeatRanks(cluster, 1, 9, false).value();
  planner::PlanFigures figures;
  figures.lower_bound_bytes = bytes;
  figures.node_in_bytes = {bytes, bytes};
  ASSERT_OK_AND_ASSIGN(const Prediction made,
                       Predict(cluster, seating, {plan, target, figures, {}}));
  const auto window = static_cast<double>(cluster.window_bytes);
  const double nic = Over(cluster.nic, kBytes, cluster.window_bytes);
  const double nic_window = Over(cluster.nic, window, cluster.window_bytes);
  const double nvlink_window = Over(cluster.nvlink, window, cluster.window_bytes);
  // One window behind at each hop; the last one only leaves when it has arrived.
  EXPECT_GE(made.seconds, nic);
  EXPECT_THAT(made.seconds, DoubleNear(nic + nvlink_window + nic_window, nic_window));
  ASSERT_EQ(made.critical_path.size(), 3U);
  EXPECT_EQ(made.critical_path[0].from, "source 0");
  EXPECT_EQ(made.critical_path[1].from, "target 0");
  EXPECT_EQ(made.critical_path[2].to, "target 8");
  EXPECT_EQ(made.wire_bytes, 3 * kBytes);
}

TEST(Predict, TimelinesAddUpToTheBytes) {
  const Cluster cluster = Shipped("h100-8x400g");
  const Case made = PredictOn(cluster, Rows(4, kRows), Rows(2, kRows));
  for (const LinkKind& kind : made.prediction.kinds) {
    ASSERT_EQ(kind.timeline.size(), 100U);
    double used = 0;
    for (const double share : kind.timeline) {
      EXPECT_LE(share, 1 + 1e-9) << kind.name;
      used += share * kind.capacity * made.prediction.seconds / 100;
    }
    EXPECT_GE(used, kind.bytes * (1 - 1e-6)) << kind.name;  // and what messages cost
    EXPECT_LE(used, kind.bytes * 1.05) << kind.name;
  }
}

TEST(SeatRanks, FillsNodesAndSaysWhenThereAreTooFew) {
  const Cluster pair = Shipped("tcp-pair");
  ASSERT_OK_AND_ASSIGN(const Seating seating, SeatRanks(pair, 3, 2, false));
  EXPECT_EQ(seating.sources[2], (Seat{0, 2}));
  EXPECT_EQ(seating.targets[0], (Seat{1, 0}));
  const auto full = SeatRanks(pair, 600, 1, false);
  EXPECT_THAT(full, IsStatus(Code::kFailedPrecondition, Reason::kLayoutMismatch));
  EXPECT_THAT(full.status().message(), HasSubstr("need 3 nodes"));
  Cluster seated = pair;
  seated.source_seats = {{1, 4}};
  ASSERT_OK_AND_ASSIGN(const Seating given, SeatRanks(seated, 1, 1, true));
  EXPECT_EQ(given.sources[0], (Seat{1, 4}));
  EXPECT_THAT(SeatRanks(seated, 2, 1, false),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
}

TEST(ClusterFile, NamesTheFieldOfEachFault) {
  const auto fault = [](const std::string& node, const std::string& rest = "") {
    return formats::ParseCluster(
               R"({"format": "tensorbus-cluster-1", "name": "c", "nodes": 2, "node": )" + node +
               rest + "}")
        .status()
        .message();
  };
  const std::string good =
      R"({"gpus": 8, "nics": 8, "nic": {"gb_per_s": 50}, "pcie": {"gb_per_s": 50}, "gpu_memory": {"gb_per_s": 3000}})";
  EXPECT_EQ(fault(good), "");
  EXPECT_THAT(formats::ParseCluster("{}").status().message(), HasSubstr("'format'"));
  EXPECT_THAT(fault("3"), HasSubstr("a node"));
  EXPECT_THAT(fault(R"({"gpus": -1})"), HasSubstr("'gpus'"));
  EXPECT_THAT(fault(R"({"ranks": 9223372036854775808, "nics": 1})"), HasSubstr("'ranks'"));
  EXPECT_THAT(fault(R"({"gpus": 8, "nics": 0, "nic": {"gb_per_s": 50}})"), HasSubstr("'nics'"));
  EXPECT_THAT(fault(R"({"gpus": 8, "nics": 1, "nic": {"gb_per_s": "x"}})"),
              HasSubstr("'gb_per_s'"));
  EXPECT_THAT(fault(R"({"gpus": 8, "nics": 1, "nic": {"gb_per_s": 1e300}})"), HasSubstr("'nic'"));
  EXPECT_THAT(fault(R"({"gpus": 8, "nics": 1, "nic": {"gb_per_s": -5}})"), HasSubstr("'nic'"));
  EXPECT_THAT(fault(R"({"gpus": 8, "nics": 1, "nic": 4})"), HasSubstr("'nic'"));
  EXPECT_THAT(fault(R"({"ranks": 8, "nics": 1, "nic": {"gb_per_s": 5}})"),
              HasSubstr("'host_memory'"));
  EXPECT_THAT(
      fault(R"({"gpus": 8, "nics": 1, "nic": {"gb_per_s": 5}, "gpu_memory": {"gb_per_s": 5}})"),
      HasSubstr("'pcie'"));
  EXPECT_THAT(fault(good, R"(, "window_bytes": 1)"), HasSubstr("'window_bytes'"));
  EXPECT_THAT(fault(good, R"(, "source": [[2, 0]])"), HasSubstr("rank 0 sits at [2, 0]"));
  EXPECT_THAT(fault(good, R"(, "source": [[0]])"), HasSubstr("[node, device]"));
}

}  // namespace
}  // namespace tensorbus::simulate
