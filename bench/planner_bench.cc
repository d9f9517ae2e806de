// Planning whole clusters: every scenario of share/manifests, one core. Per scenario:
//
//   plan         from two layouts to the ops of all ranks, and what the certificate adds; without
//                relays and with them
//   own_part     the ops of one agent's eight sources, and of another's eight targets, each with
//                its certificate, given the class-level plan
//   replan       all ops once more after a source is lost, given what matching found out; and the
//                same with relays
//   naive        the same ops by nested loops over ranks, tensors and boxes, first holder wins: no
//                balance, rounds, routes or digest. A baseline, of no use otherwise
//
// Plans are certified before anything is timed. `op_rate` is ops a second of plan and certificate.

#include <algorithm>
#include <benchmark/benchmark.h>
#include <ctime>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <sys/resource.h>
#include <unordered_map>
#include <vector>

#include "planner/certificate.h"
#include "planner/class_plan.h"
#include "planner/topology.h"
#include "tensorbus/base/check.h"
#include "tensorbus/formats/layout_book_file.h"
#include "tests/unit/planner/shipped_scenario.h"

namespace tensorbus::planner {
namespace {

const std::string kManifests = TENSORBUS_MANIFESTS;

struct Case : ShippedScenario {
  Topology topology;
};

/// The scenario's layouts; only the last one asked for is kept.
const Case& CaseOf(const std::string& id) {
  static Case last;
  if (last.id == id) return last;
  static_cast<ShippedScenario&>(last) = LoadScenario(kManifests, id).value();
  TB_CHECK(last.id == id);
  last.topology = DefaultTopology(last.source.rank_count, last.target.rank_count, last.colocated);
  return last;
}

/// Processor time, since the machine may be shared.
double Now() {
  timespec now = {};
  TB_CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now) == 0);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void PlanAll(benchmark::State& state, const std::string& scenario, bool relays) {
  const Case& c = CaseOf(scenario);
  const auto build = [&] {
    return BuildPlan(c.source, c.target, c.topology, nullptr, {.relays = relays}).value();
  };
  TB_CHECK(CheckPlan(c.source, c.target, c.topology, build()).ok());
  double plan_seconds = 0;
  double certificate_seconds = 0;
  std::size_t ops = 0;
  for (auto _ : state) {
    const double begin = Now();
    const Plan plan = build();
    const double planned = Now();
    benchmark::DoNotOptimize(CheckPlan(c.source, c.target, c.topology, plan));
    const double end = Now();
    plan_seconds += planned - begin;
    certificate_seconds += end - planned;
    state.SetIterationTime(end - begin);
    ops = plan.ops.size();
  }
  const auto runs = static_cast<double>(state.iterations());
  state.counters["plan_s"] = plan_seconds / runs;
  state.counters["certificate_s"] = certificate_seconds / runs;
  state.counters["ops"] = static_cast<double>(ops);
  state.counters["op_rate"] =
      static_cast<double>(ops) * runs / (plan_seconds + certificate_seconds);
  rusage usage = {};
  TB_CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
  state.counters["rss_peak_mib"] = static_cast<double>(usage.ru_maxrss) / 1024;
}

void PlanDirect(benchmark::State& state, const std::string& scenario) {
  PlanAll(state, scenario, false);
}
void PlanRelays(benchmark::State& state, const std::string& scenario) {
  PlanAll(state, scenario, true);
}

std::vector<std::uint32_t> FirstEight(std::uint32_t rank_count) {
  std::vector<std::uint32_t> ranks(std::min<std::uint32_t>(8, rank_count));
  std::iota(ranks.begin(), ranks.end(), 0U);
  return ranks;
}

void OwnPart(benchmark::State& state, const std::string& scenario, bool of_sources) {
  const Case& c = CaseOf(scenario);
  const LayoutMatch match = MatchLayouts(c.source, c.target, {}, nullptr).value();
  const ClassPlan classes = BuildClassPlan(match, c.topology).value();
  RankSelection own;
  if (of_sources) {
    own.sources = FirstEight(c.source.rank_count);
  } else {
    own.targets = FirstEight(c.target.rank_count);
  }
  std::size_t ops = 0;
  for (auto _ : state) {
    const double begin = Now();
    const Plan part = PlanForRanks(classes, own);
    TB_CHECK(CheckPart(c.source, c.target, c.topology, part, own).ok());
    state.SetIterationTime(Now() - begin);
    ops = part.ops.size();
  }
  state.counters["ops"] = static_cast<double>(ops);
}

void SourcesPart(benchmark::State& state, const std::string& scenario) {
  OwnPart(state, scenario, true);
}
void TargetsPart(benchmark::State& state, const std::string& scenario) {
  OwnPart(state, scenario, false);
}

/// A source whose bytes others hold too, or none: then nothing can be planned without it.
std::optional<std::uint32_t> Expendable(const Case& c, const LayoutMatch& match, bool relays) {
  for (std::uint32_t rank = 0; rank < c.source.rank_count; ++rank) {
    const PlanOptions options = {.relays = relays, .lost = {.sources = {rank}, .targets = {}}};
    if (BuildClassPlan(match, c.topology, nullptr, options).ok()) return rank;
  }
  return std::nullopt;
}

/// Without a source that others can stand in for, else without a target.
void Replan(benchmark::State& state, const std::string& scenario, bool relays) {
  const Case& c = CaseOf(scenario);
  PlanOptions options = {.relays = relays};
  const LayoutMatch match = MatchLayouts(c.source, c.target, options, nullptr).value();
  if (const auto source = Expendable(c, match, relays)) {
    options.lost.sources = {*source};
    state.SetLabel("without a source");
  } else {
    options.lost.targets = {0};
    state.SetLabel("without a target");
  }
  for (auto _ : state) {
    const double begin = Now();
    const Plan plan = WriteOut(BuildClassPlan(match, c.topology, nullptr, options).value());
    state.SetIterationTime(Now() - begin);
    TB_CHECK(CheckPlan(c.source, c.target, c.topology, plan, options.lost).ok());
  }
}

void ReplanDirect(benchmark::State& state, const std::string& scenario) {
  Replan(state, scenario, false);
}
void ReplanRelays(benchmark::State& state, const std::string& scenario) {
  Replan(state, scenario, true);
}

using BoxesByName = std::unordered_map<std::string_view, const std::vector<Box>*>;

std::vector<BoxesByName> ByRank(const JobLayout& job) {
  std::vector<BoxesByName> ranks(job.rank_count);
  for (const JobLayout::Tensor& tensor : job.tensors) {
    for (const RankBoxes& held : job.HoldingOf(tensor).ranks)
      ranks[held.rank].emplace(tensor.spec.name, &held.boxes);
  }
  return ranks;
}

/// What a first version of a planner does: every rank knows its tensors by name.
std::vector<CopyOp> NaivePlan(const Case& c) {
  const std::vector<BoxesByName> sources = ByRank(c.source);
  const std::vector<BoxesByName> targets = ByRank(c.target);
  std::vector<CopyOp> ops;
  for (std::uint32_t target = 0; target < targets.size(); ++target) {
    for (std::uint32_t t = 0; t < c.target.tensors.size(); ++t) {
      const auto wanted = targets[target].find(c.target.tensors[t].spec.name);
      if (wanted == targets[target].end()) continue;
      for (const Box& box : *wanted->second) {
        std::uint64_t missing = box.volume();
        std::vector<Box> got;
        for (std::uint32_t source = 0; source < sources.size() && missing > 0; ++source) {
          const auto held = sources[source].find(wanted->first);
          if (held == sources[source].end()) continue;
          for (const Box& part : *held->second) {
            const auto common = Intersect(part, box);
            if (!common || std::find(got.begin(), got.end(), *common) != got.end()) continue;
            got.push_back(*common);
            missing -= common->volume();
            ops.push_back({t, source, target, false, false, *common});
          }
        }
        TB_CHECK(missing == 0);
      }
    }
  }
  return ops;
}

void Naive(benchmark::State& state, const std::string& scenario) {
  const Case& c = CaseOf(scenario);
  std::size_t ops = 0;
  for (auto _ : state) {
    const double begin = Now();
    ops = NaivePlan(c).size();
    state.SetIterationTime(Now() - begin);
  }
  state.counters["ops"] = static_cast<double>(ops);
}

void RegisterAll() {
  using Run = void (*)(benchmark::State&, const std::string&);
  const std::vector<std::pair<const char*, Run>> runs = {{"plan/direct", PlanDirect},
                                                         {"plan/relays", PlanRelays},
                                                         {"own_part/sources", SourcesPart},
                                                         {"own_part/targets", TargetsPart},
                                                         {"replan/direct", ReplanDirect},
                                                         {"replan/relays", ReplanRelays},
                                                         {"naive", Naive}};
  const LayoutBook book = formats::ReadLayoutBook(kManifests + "/layouts.json").value();
  for (const Scenario& scenario : book.scenarios) {
    for (const auto& [name, run] : runs) {
      auto* registered =
          benchmark::RegisterBenchmark((scenario.id + "/" + name).c_str(), run, scenario.id)
              ->UseManualTime()
              ->Unit(benchmark::kMillisecond);
      if (run == Naive) registered->Iterations(1);  // up to a minute
    }
  }
}

}  // namespace
}  // namespace tensorbus::planner

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("time", "processor time of one thread");
  tensorbus::planner::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
