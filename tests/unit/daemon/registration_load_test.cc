#include <atomic>
#include <chrono>
#include <fmt/format.h>
#include <future>
#include <gtest/gtest.h>
#include <iostream>
#include <thread>

#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/protocol.h"
#include "tensorbus/rpc/status_map.h"
#include "tests/testing/inline_side_work.h"
#include "tests/testing/status_matchers.h"

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

/// The longest the executor took to come to a task, while both jobs registered.
Nanos LongestWait(ThreadExecutor& executor, SideWork& work, const std::vector<std::string>& sources,
                  const std::vector<std::string>& targets) {
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
      say(std::move(message));
    }
  };
  std::atomic<bool> over{false};
  Nanos longest{};
  std::thread probe([&] {
    while (!over) {
      std::promise<void> came;
      const TimePoint asked = std::chrono::steady_clock::now();
      executor.Post([&came] { came.set_value(); });
      came.get_future().wait();
      longest = std::max<Nanos>(longest, std::chrono::steady_clock::now() - asked);
      std::this_thread::yield();
    }
  });
  register_all("trainer", Role::kProducer, sources);
  register_all("engine", Role::kConsumer, targets);
  EXPECT_OK(ear->Await(sources.size() + targets.size()));
  over = true;
  probe.join();
  executor.Stop();  // no timer of the core runs any more
  return longest;
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
    on_it = LongestWait(executor, work, sources, targets);
  }
  Nanos beside_it{};
  {
    ThreadExecutor executor("threads");
    ThreadSideWork work(executor);
    beside_it = LongestWait(executor, work, sources, targets);
    work.Stop();
  }
  RecordProperty("on_executor_ms", static_cast<int>(on_it / 1ms));
  RecordProperty("beside_executor_ms", static_cast<int>(beside_it / 1ms));
  std::cout << fmt::format("longest wait: {} ms on the executor, {} ms beside it\n", on_it / 1ms,
                           beside_it / 1ms);
  EXPECT_LT(beside_it * 3, on_it);
}

}  // namespace
}  // namespace tensorbus::daemon
