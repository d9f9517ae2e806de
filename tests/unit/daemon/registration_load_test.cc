#include <algorithm>
#include <atomic>
#include <chrono>
#include <fmt/format.h>
#include <future>
#include <gtest/gtest.h>
#include <iostream>
#include <set>
#include <thread>

#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/protocol.h"
#include "tensorbus/rpc/status_map.h"
#include "tests/testing/inline_side_work.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/shipped_scenario.h"

// How long the daemon's executor stands still while jobs with very many tensors register: once with
// the work on layouts done on the executor itself, once beside it.
namespace tensorbus::daemon {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kTensors = 139'583;  // a large mixture of experts, every expert by itself
constexpr std::uint32_t kSources = 4;
constexpr std::uint32_t kTargets = 2;

/// An agent that only listens.
class Ear final : public rpc::AgentPort {
 public:
  void Send(proto::DaemonMessage message) override {
    if (!message.has_rank_registered()) return;
    MutexLock lock(mutex_);
    if (failure_.ok()) failure_ = rpc::FromProto(message.rank_registered().error());
    ++answers_;
    changed_.NotifyAll();
  }
  void Close(Status) override {}
  Status Await(std::size_t answers) {
    MutexLock lock(mutex_);
    const TimePoint deadline = std::chrono::steady_clock::now() + 5min;
    while (answers_ < answers) {
      if (!changed_.WaitUntil(mutex_, deadline)) return {Code::kInternal, "no answer"};
    }
    return failure_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  Status failure_ TB_GUARDED_BY(mutex_);
  std::size_t answers_ TB_GUARDED_BY(mutex_) = 0;
};

/// Rank `rank` of `count`: its rows of every tensor.
std::string LayoutOf(std::uint32_t rank, std::uint32_t count) {
  RankLayout layout;
  const std::uint64_t dims[] = {16, 64};
  const Shape shape = Shape::Create(dims).value();
  const Range box[] = {{rank * 16ULL / count, (rank + 1) * 16ULL / count}, {0, 64}};
  for (std::uint32_t i = 0; i < kTensors; ++i) {
    layout.tensors.push_back(
        {.spec = {.name = fmt::format("model.layers.{}.mlp.experts.{}.down_proj.weight", i / 2000,
                                      i % 2000),
                  .dtype = DType::kBf16,
                  .shape = shape},
         .boxes = {Box(std::span<const Range>(box))}});
  }
  return rpc::ToString(Serialize(layout));
}

/// What each rank of a job registers.
std::vector<std::string> LayoutsOf(const JobLayout& job) {
  std::vector<RankLayout> ranks(job.rank_count);
  for (const JobLayout::Tensor& tensor : job.tensors) {
    for (const RankBoxes& held : job.HoldingOf(tensor).ranks) {
      ranks[held.rank].tensors.push_back({tensor.spec, held.boxes});
    }
  }
  std::vector<std::string> layouts;
  layouts.reserve(ranks.size());
  for (const RankLayout& rank : ranks) layouts.push_back(rpc::ToString(Serialize(rank)));
  return layouts;
}

struct Load {
  Nanos longest_wait{};  ///< the longest the executor took to come to a task
  Nanos all{};           ///< until the last rank was answered
};

/// Registers both jobs, all ranks at once.
Load LoadOf(ThreadExecutor& executor, SideWork& work, const std::vector<std::string>& sources,
            const std::vector<std::string>& targets,
            const std::vector<std::string>& leave_out = {}) {
  Metrics registry;
  DaemonMetrics metrics(registry);
  Core core({}, executor, work, metrics);
  const auto ear = std::make_shared<Ear>();
  const rpc::PortId port{1};
  const auto say = [&](proto::AgentMessage message) {
    executor.Post([&core, port, message = std::move(message)] { core.OnMessage(port, message); });
  };
  executor.Post([&] { core.OnAttach(port, ear, "test"); });
  proto::AgentMessage hello;
  hello.mutable_hello()->set_protocol(rpc::kControlProtocol);
  hello.mutable_hello()->set_agent("a");
  say(std::move(hello));
  std::uint64_t request = 0;
  const auto register_all = [&](const std::string& job, Role role,
                                const std::vector<std::string>& layouts) {
    for (std::uint32_t rank = 0; rank < layouts.size(); ++rank) {
      proto::AgentMessage message;
      proto::RegisterRank& body = *message.mutable_register_rank();
      body.set_request(++request);
      *body.mutable_rank() =
          rpc::ToProto(RankIdentity{.channel = "policy",
                                    .job = job,
                                    .role = role,
                                    .replica = 0,
                                    .rank = rank,
                                    .rank_count = static_cast<std::uint32_t>(layouts.size())});
      body.set_layout(layouts[rank]);
      body.set_flip(1);
      body.set_proof(3);
      body.set_memory_mode(1);
      if (role == Role::kConsumer)
        body.mutable_leave_out()->Assign(leave_out.begin(), leave_out.end());
      say(std::move(message));
    }
  };
  std::atomic<bool> over{false};
  Load load;
  // Also the agent's heartbeat, without which the daemon would give it up.
  std::thread probe([&] {
    proto::AgentMessage beat;
    beat.mutable_heartbeat();
    while (!over) {
      std::promise<void> came;
      const TimePoint asked = std::chrono::steady_clock::now();
      executor.Post([&] {
        core.OnMessage(port, beat);
        came.set_value();
      });
      came.get_future().wait();
      load.longest_wait =
          std::max<Nanos>(load.longest_wait, std::chrono::steady_clock::now() - asked);
      std::this_thread::sleep_for(100us);
    }
  });
  const TimePoint begin = std::chrono::steady_clock::now();
  register_all("trainer", Role::kProducer, sources);
  register_all("engine", Role::kConsumer, targets);
  EXPECT_OK(ear->Await(sources.size() + targets.size()));
  load.all = std::chrono::steady_clock::now() - begin;
  over = true;
  probe.join();
  executor.Stop();  // no timer of the core runs any more
  return load;
}

TEST(RegistrationLoad, TheExecutorGoesOnWhileManyTensorsRegister) {
  std::vector<std::string> sources;
  std::vector<std::string> targets;
  for (std::uint32_t rank = 0; rank < kSources; ++rank) {
    sources.push_back(LayoutOf(rank, kSources));
  }
  for (std::uint32_t rank = 0; rank < kTargets; ++rank) {
    targets.push_back(LayoutOf(rank, kTargets));
  }
  Nanos on_it{};
  {
    ThreadExecutor executor("inline");
    testing::InlineSideWork work(executor);
    on_it = LoadOf(executor, work, sources, targets).longest_wait;
  }
  Nanos beside_it{};
  {
    ThreadExecutor executor("threads");
    ThreadSideWork work(executor);
    beside_it = LoadOf(executor, work, sources, targets).longest_wait;
    work.Stop();
  }
  RecordProperty("on_executor_ms", static_cast<int>(on_it / 1ms));
  RecordProperty("beside_executor_ms", static_cast<int>(beside_it / 1ms));
  std::cout << fmt::format("longest wait: {} ms on the executor, {} ms beside it\n", on_it / 1ms,
                           beside_it / 1ms);
  EXPECT_LT(beside_it * 3, on_it);
}

// Kimi-K2 as 256 trainer ranks and 128 engine ranks hold it.
TEST(RegistrationLoad, TheLargestScenarioIsRegisteredWhole) {
  ASSERT_OK_AND_ASSIGN(const planner::ShippedScenario scenario,
                       planner::LoadScenario(TENSORBUS_MANIFESTS, "S11-kimi-k2-fp8-"));
  const JobLayout& source = scenario.source;
  const JobLayout& target = scenario.target;
  ASSERT_EQ(target.tensors.size(), kTensors);
  ASSERT_EQ(source.rank_count, 256U);
  ASSERT_EQ(target.rank_count, 128U);
  std::set<std::string> taken;
  for (const JobLayout::Tensor& tensor : target.tensors) taken.insert(tensor.spec.name);
  std::vector<std::string> leave_out;
  for (const JobLayout::Tensor& tensor : source.tensors) {
    if (!taken.contains(tensor.spec.name)) leave_out.push_back(tensor.spec.name);
  }
  const std::vector<std::string> sources = LayoutsOf(source);
  const std::vector<std::string> targets = LayoutsOf(target);
  std::size_t bytes = 0;
  for (const std::string& layout : sources) bytes += layout.size();
  for (const std::string& layout : targets) bytes += layout.size();
  ThreadExecutor executor("threads");
  ThreadSideWork work(executor);
  const Load load = LoadOf(executor, work, sources, targets, leave_out);
  work.Stop();
  RecordProperty("registered_ms", static_cast<int>(load.all / 1ms));
  RecordProperty("longest_wait_ms", static_cast<int>(load.longest_wait / 1ms));
  std::cout << fmt::format("{} ranks with {} MB of layouts: {} ms, longest wait {} ms\n",
                           sources.size() + targets.size(), bytes / 1'000'000, load.all / 1ms,
                           load.longest_wait / 1ms);
}

}  // namespace
}  // namespace tensorbus::daemon
