#include "planner/cost.h"

#include "planner/topology.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

/// 10 GB/s, packing as fast, 1 MiB windows.
TransportCost Plain() {
  return {.name = "plain",
          .bytes_per_us = 10000,
          .pack_bytes_per_us = 10000,
          .window_bytes = 1 << 20,
          .window_ns = 1000,
          .run_ns = 1000,
          .descriptor_ns = 2000,
          .row_ns = 10,
          .strided = true};
}

TEST(ChooseWindow, LargeRunsStayInPlaceAndSmallOnesDoNot) {
  const TransportCost cost = Plain();
  // One run: nothing is simpler than sending it.
  const RouteShape whole{.bytes = 1 << 30, .op_count = 1, .run_count = 1, .shard_bytes = 1 << 30};
  EXPECT_EQ(ChooseWindow(cost, whole), WindowKind::kContiguous);
  // One op of many rows: one descriptor.
  const RouteShape rows{
      .bytes = 64 << 20, .op_count = 1, .run_count = 1 << 16, .shard_bytes = 128 << 20};
  EXPECT_EQ(ChooseWindow(cost, rows), WindowKind::kStrided);
  // The same without descriptors: packed.
  TransportCost messages = cost;
  messages.strided = false;
  EXPECT_EQ(ChooseWindow(messages, rows), WindowKind::kBucket);
  // Many tiny ops: packed.
  const RouteShape tiny{
      .bytes = 1 << 20, .op_count = 4096, .run_count = 4096, .shard_bytes = 64 << 20};
  EXPECT_EQ(ChooseWindow(cost, tiny), WindowKind::kBucket);
  // Nearly all of the sender's boxes, and a wire faster than packing: as they lie.
  TransportCost fast = messages;
  fast.bytes_per_us = 100000;
  const RouteShape most{
      .bytes = 63 << 20, .op_count = 1, .run_count = 1 << 16, .shard_bytes = 64 << 20};
  EXPECT_EQ(ChooseWindow(fast, most), WindowKind::kShard);
}

TEST(ChooseWindow, BucketsNeverLoseOnLargeTensors) {
  for (const std::uint64_t run_ns : {10U, 100U, 1000U, 10000U}) {
    TransportCost cost = Plain();
    cost.run_ns = run_ns;
    for (std::uint64_t runs = 1; runs <= 1 << 20; runs *= 2) {
      for (const std::uint64_t bytes : {1ULL << 20, 1ULL << 30, 1ULL << 40}) {
        const RouteShape shape{
            .bytes = bytes, .op_count = 1, .run_count = runs, .shard_bytes = 2 * bytes};
        const WindowKind kind = ChooseWindow(cost, shape);
        EXPECT_LE(WindowNs(cost, shape, kind), WindowNs(cost, shape, WindowKind::kContiguous));
        // Runs of 16 MiB are worth a message each, whatever it costs here.
        EXPECT_TRUE(bytes / runs < 16 << 20 || kind != WindowKind::kBucket);
      }
    }
  }
}

TEST(ShapesOf, CountsRunsAndShardsOnBothSides) {
  // [8, 6] f32: rows over two sources, columns over two targets.
  const Shape shape = MakeShape({8, 6});
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, shape}, {"b", DType::kF32, shape}};
  const std::vector<Placement> rows = {Shard(0)};
  const std::vector<Placement> columns = {Shard(1)};
  const JobLayout source = JobOf(2, specs, Resolve(Mesh({2}), rows, shape, 2).value());
  const JobLayout target = JobOf(2, specs, Resolve(Mesh({2}), columns, shape, 2).value());
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(source, target, {}));
  const std::vector<RouteShape> shapes = ShapesOf(source, target, plan);
  ASSERT_EQ(shapes.size(), 4U);
  for (const RouteShape& s : shapes) {
    EXPECT_EQ(s.bytes, 2U * 4 * 3 * 4);
    EXPECT_EQ(s.op_count, 2U);
    EXPECT_EQ(s.run_count, 2U * 4);
    EXPECT_EQ(s.shard_bytes, 2U * 4 * 6 * 4);
  }
  // The same rows on both sides: one run an op, and the shard is what is needed.
  ASSERT_OK_AND_ASSIGN(const Plan same, BuildPlan(source, source, {}));
  for (const RouteShape& s : ShapesOf(source, source, same)) {
    EXPECT_EQ(s.run_count, s.op_count);
    EXPECT_EQ(s.shard_bytes, s.bytes);
  }
}

TEST(ShapesOf, RelayedOpsLieInBoxesOfTargets) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({8})}};
  const std::vector<Placement> whole = {Placement()};
  const JobLayout one = JobOf(1, specs, Resolve(Mesh({1}), whole, specs[0].shape, 1).value());
  const JobLayout two = JobOf(2, specs, Resolve(Mesh({2}), whole, specs[0].shape, 2).value());
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(one, two, {}, nullptr, {.relays = true}));
  for (const RouteShape& s : ShapesOf(one, two, plan)) EXPECT_EQ(s.shard_bytes, 32U);
}

}  // namespace
}  // namespace tensorbus::planner
