#include <algorithm>
#include <fmt/format.h>

#include "planner/topology.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/checked_plan.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

/// Small tensors of five sizes, each held by two of three sources and needed by all targets.
JobPair SmallTensors(std::uint32_t count, std::uint32_t target_count) {
  constexpr std::uint32_t kKinds = 15;
  const auto shape = [](std::uint32_t kind) { return MakeShape({40 + 24 * (kind * 7 % 5)}); };
  JobPair pair;
  pair.source.rank_count = 3;
  pair.target.rank_count = target_count;
  for (std::uint32_t kind = 0; kind < kKinds; ++kind) {
    const std::vector<Box> whole = {Box::Whole(shape(kind))};
    Holding& held = pair.source.holdings.emplace_back();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      if (rank != kind % 3) held.ranks.push_back({rank, whole});
    }
    Holding& needed = pair.target.holdings.emplace_back();
    for (std::uint32_t rank = 0; rank < target_count; ++rank) needed.ranks.push_back({rank, whole});
  }
  for (std::uint32_t t = 0; t < count; ++t) {
    const TensorSpec spec = {fmt::format("t{}", t), DType::kU8, shape(t % kKinds)};
    pair.source.tensors.push_back({spec, t % kKinds});
    pair.target.tensors.push_back({spec, t % kKinds});
  }
  return pair;
}

std::uint64_t LeastOfBusiest(const JobPair& pair, std::uint32_t times) {
  std::uint64_t bytes = 0;
  for (const JobLayout::Tensor& tensor : pair.source.tensors) bytes += tensor.spec.shape.elements();
  return (bytes * times + 2) / 3;
}

TEST(EvenOut, SmallBoxesGoFromWhoIsNotBusy) {
  for (std::uint32_t count = 10; count <= 60; ++count) {
    for (const bool relays : {false, true}) {
      SCOPED_TRACE(::testing::Message() << count << " tensors" << (relays ? " with relays" : ""));
      constexpr std::uint32_t kTargets = 3;
      const JobPair pair = SmallTensors(count, kTargets);
      ASSERT_OK(Validate(pair.source));
      ASSERT_OK_AND_ASSIGN(const CheckedPlan made,
                           MakeCheckedPlan(pair.source, pair.target, {}, {.relays = relays}));
      const PlanFigures& figures = made.figures;
      EXPECT_EQ(ElementFault(pair.source, pair.target, made.plan), "");
      const std::uint64_t least = LeastOfBusiest(pair, relays ? 1 : kTargets);
      // Boxes are moved one by one, so about the smallest one's bytes may be left over.
      EXPECT_LE(*std::max_element(figures.send_bytes.begin(), figures.send_bytes.end()),
                least + least / 64 + 40);
    }
  }
}

}  // namespace
}  // namespace tensorbus::planner
