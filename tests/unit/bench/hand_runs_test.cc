#include "bench/hand_runs.h"

#include <array>
#include <cstring>
#include <gtest/gtest.h>

#include "tensorbus/cli/bench_pattern.h"
#include "tensorbus/cli/bench_workload.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::bench {
namespace {

/// Copies every run between arenas of the closed form and compares all of the target.
void CopyAndCheck(const cli::Workload& workload) {
  std::vector<std::vector<std::byte>> sources;
  for (std::uint32_t r = 0; r < workload.source.rank_count; ++r) {
    const cli::RankArena arena = cli::PlaceRank(workload.source, r);
    sources.emplace_back(arena.bytes);
    cli::FillArena(workload.source, arena, 5, sources.back().data());
  }
  for (std::uint32_t t = 0; t < workload.target.rank_count; ++t) {
    const cli::RankArena arena = cli::PlaceRank(workload.target, t);
    std::vector<std::byte> memory(arena.bytes);
    ASSERT_OK_AND_ASSIGN(const std::vector<Run> runs, RunsOf(workload.source, workload.target, t));
    for (const Run& run : runs) {
      ASSERT_LE(run.source_offset + run.bytes, sources[run.source].size());
      ASSERT_LE(run.target_offset + run.bytes, memory.size());
      std::memcpy(memory.data() + run.target_offset, sources[run.source].data() + run.source_offset,
                  run.bytes);
    }
    EXPECT_OK(cli::CheckArena(workload.target, arena, 5, memory.data()));
  }
}

/// A workload of the table, its first dimensions divided by 64.
auto Scaled(const char* name) {
  cli::WorkloadChoice choice;
  choice.name = name;
  choice.scale = 64;
  return cli::ChooseWorkloads(choice);
}

TEST(HandRuns, CoverEveryWorkloadOfTheTable) {
  for (const char* name : {"large", "small", "replicas", "uneven"}) {
    SCOPED_TRACE(name);
    ASSERT_OK_AND_ASSIGN(const auto workloads, Scaled(name));
    CopyAndCheck(workloads.front());
  }
}

TEST(HandRuns, AreAsLongAsTheyCanBe) {
  ASSERT_OK_AND_ASSIGN(const auto large, Scaled("large"));
  ASSERT_OK_AND_ASSIGN(const auto runs, RunsOf(large[0].source, large[0].target, 0));
  // 64 rows of 8 tensors, each row's half: what a column cut leaves.
  EXPECT_EQ(runs.size(), 8U * 64);
  EXPECT_EQ(runs.front().bytes, 4096U);
  ASSERT_OK_AND_ASSIGN(const auto whole, Scaled("replicas"));
  ASSERT_OK_AND_ASSIGN(const auto one, RunsOf(whole[0].source, whole[0].target, 0));
  // Both arenas are laid out alike.
  EXPECT_EQ(one.size(), 1U);
}

}  // namespace
}  // namespace tensorbus::bench
