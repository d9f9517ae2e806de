// Copies of one strided block, each as a ratio to memcpy of the same runs in the same run of the
// program: `ratio` above 1 is faster than memcpy. The two alternate, so that other load hits both.
// Bytes are compared before anything is timed.

#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cstring>
#include <future>
#include <random>
#include <vector>

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/copy.h"
#include "tensorbus/transport/shm_transport.h"

namespace tensorbus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kPayloadBytes = std::uint64_t{128} << 20;

/// Rows of `run` bytes out of a source with rows twice as long, onto a contiguous target.
struct Workload {
  explicit Workload(std::uint64_t run_bytes) : run(run_bytes), rows(kPayloadBytes / run_bytes) {
    from.resize(rows * run * 2);
    to.resize(rows * run);
    std::mt19937_64 random(7);
    for (std::size_t at = 0; at + 8 <= from.size(); at += 8) {
      const std::uint64_t word = random();
      std::memcpy(from.data() + at, &word, sizeof word);
    }
    source.base = from.data();
    source.rank = 2;
    source.extents = {rows, run};
    source.strides = {run * 2, 1};
    source.stream_strides = source.strides;
    source.key = {.a = 1, .b = 2};
    target = source;
    target.base = to.data();
    target.strides = {run, 1};
  }
  void Memcpy() {
    for (std::uint64_t r = 0; r < rows; ++r) {
      std::memcpy(to.data() + r * run, from.data() + r * run * 2, run);
    }
    benchmark::ClobberMemory();
  }
  bool Arrived() const {
    for (std::uint64_t r = 0; r < rows; ++r) {
      if (std::memcmp(to.data() + r * run, from.data() + r * run * 2, run) != 0) return false;
    }
    return true;
  }

  std::uint64_t run;
  std::uint64_t rows;
  std::vector<std::byte> from;
  std::vector<std::byte> to;
  StridedBlock source;
  StridedBlock target;
};

template <typename Copy>
void Compare(benchmark::State& state, const Copy& copy) {
  Workload workload(static_cast<std::uint64_t>(state.range(0)));
  copy(workload);
  TB_CHECK(workload.Arrived());
  std::vector<double> ratios;
  for (auto _ : state) {
    const auto start = Clock::now();
    workload.Memcpy();
    const auto middle = Clock::now();
    copy(workload);
    const auto end = Clock::now();
    state.SetIterationTime(std::chrono::duration<double>(end - middle).count());
    ratios.push_back(std::chrono::duration<double>(middle - start) /
                     std::chrono::duration<double>(end - middle));
  }
  std::nth_element(ratios.begin(), ratios.begin() + static_cast<std::ptrdiff_t>(ratios.size() / 2),
                   ratios.end());
  state.counters["ratio"] = ratios[ratios.size() / 2];
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kPayloadBytes));
}

void Plain(benchmark::State& state) {
  Compare(state, [](Workload& w) { kernels::CopyBlock(w.source, w.target); });
}
void Digest(benchmark::State& state) {
  Compare(state, [](Workload& w) {
    benchmark::DoNotOptimize(kernels::CopyBlockDigest(w.source, w.target));
  });
}
void Readback(benchmark::State& state) {
  Compare(state, [](Workload& w) {
    const kernels::CopySums sums = kernels::CopyBlockReadback(w.source, w.target);
    TB_CHECK(sums.source == sums.target);
  });
}

/// The whole way of a pull on one host, all cores, against memcpy on one.
void ShmReadback(benchmark::State& state) {
  const auto shm = transport::ShmTransport::Create();
  const transport::RouteKey key = {.session = SessionId{1}, .source_rank = 0, .target_rank = 1};
  const transport::Capability capability =
      transport::Capability::FromBytes(std::string(transport::Capability::kBytes, 'b')).value();
  Compare(state, [&](Workload& w) {
    TB_CHECK(shm->Expose(key, {.blocks = {w.source}, .capability = capability}).ok());
    std::promise<bool> done;
    shm->Pull(
        key, {.blocks = {w.target}},
        {.deadline = Clock::now() + std::chrono::seconds(60), .peer = "", .capability = capability},
        [&](Result<transport::PullResult> result) { done.set_value(result.ok()); });
    TB_CHECK(done.get_future().get());
    shm->Withdraw(key);
  });
}

#define TB_RUNS Arg(256)->Arg(1024)->Arg(4096)->Arg(65536)->UseManualTime()->Iterations(7)
BENCHMARK(Plain)->TB_RUNS;
BENCHMARK(Digest)->TB_RUNS;
BENCHMARK(Readback)->TB_RUNS;
BENCHMARK(ShmReadback)->TB_RUNS;

}  // namespace
}  // namespace tensorbus

int main(int argc, char** argv) {
  benchmark::AddCustomContext("instruction_set", std::string(tensorbus::kernels::InstructionSet()));
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
