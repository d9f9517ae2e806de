#include "tests/conformance/worlds.h"

#include <chrono>
#include <future>
#include <utility>

#include "tensorbus/base/executor.h"
#include "tensorbus/transport/fake_transport.h"
#include "tensorbus/transport/shm_transport.h"
#include "tensorbus/transport/tcp_transport.h"
#include "tests/testing/test_capability.h"

namespace tensorbus::transport {

using std::chrono::seconds;
using std::chrono::steady_clock;

namespace {

class FakeWorld final : public World {
 public:
  explicit FakeWorld(const WorldOptions& options)
      : source_(net_, executor_, {.endpoint = "fake://source"}),
        target_(std::make_unique<FakeTransport>(
            net_, executor_,
            FakeOptions{.endpoint = "fake://target", .landing_hook = options.landing_hook})) {}
  Transport& source() override { return source_; }
  Transport& target() override { return *target_; }
  std::string peer() override { return source_.endpoint(); }
  std::unique_ptr<Transport> TakeTarget() override { return std::move(target_); }

 private:
  FakeNet net_;
  ThreadExecutor executor_{"fake"};
  FakeTransport source_;
  std::unique_ptr<FakeTransport> target_;
};

class ShmWorld final : public World {
 public:
  explicit ShmWorld(const WorldOptions& options)
      : owned_(ShmTransport::Create(
            {.threads = options.threads, .landing_hook = options.landing_hook})),
        shm_(owned_.get()) {}
  Transport& source() override { return *shm_; }
  Transport& target() override { return *shm_; }
  std::string peer() override { return ""; }
  std::unique_ptr<Transport> TakeTarget() override { return std::move(owned_); }

 private:
  std::unique_ptr<ShmTransport> owned_;
  ShmTransport* shm_;
};

class TcpWorld final : public World {
 public:
  explicit TcpWorld(const WorldOptions& options)
      : staging_(StagingBudget::Create(options.staging_bytes)) {
    for (auto* end : {&source_, &target_}) {
      auto created = TcpTransport::Create({.token = "conformance",
                                           .io_threads = options.threads,
                                           .staging = staging_,
                                           .landing_hook = options.landing_hook});
      TB_CHECK(created.ok());
      *end = std::move(*created);
    }
  }
  Transport& source() override { return *source_; }
  Transport& target() override { return *target_; }
  std::string peer() override { return source_->endpoint(); }
  std::unique_ptr<Transport> TakeTarget() override { return std::move(target_); }

 private:
  std::shared_ptr<StagingBudget> staging_;
  std::unique_ptr<TcpTransport> source_;
  std::unique_ptr<TcpTransport> target_;
};

class FaultyWorld final : public World {
 public:
  FaultyWorld(std::unique_ptr<World> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)),
        faulty_(
            std::make_unique<FaultyTransport>(inner_->TakeTarget(), std::move(plan), executor_)) {}
  Transport& source() override { return inner_->source(); }
  Transport& target() override { return *faulty_; }
  std::string peer() override { return inner_->peer(); }
  std::unique_ptr<Transport> TakeTarget() override { return std::move(faulty_); }

 private:
  ThreadExecutor executor_{"faulty"};
  std::unique_ptr<World> inner_;
  std::unique_ptr<FaultyTransport> faulty_;
};

}  // namespace

std::unique_ptr<World> MakeFaultyWorld(const WorldFactory& make, std::vector<Fault> faults,
                                       WorldOptions options) {
  auto plan = FaultPlan::Create(std::move(faults));
  if (options.landing_hook == nullptr) options.landing_hook = plan->Hook();
  return std::make_unique<FaultyWorld>(make(std::move(options)), std::move(plan));
}

std::unique_ptr<World> MakeFaultlessFaultyWorld(WorldOptions options) {
  return MakeFaultyWorld(MakeShmWorld, {}, std::move(options));
}

std::unique_ptr<World> MakeTcpWorld(WorldOptions options) {
  return std::make_unique<TcpWorld>(options);
}

std::unique_ptr<World> MakeFakeWorld(WorldOptions options) {
  return std::make_unique<FakeWorld>(options);
}

std::unique_ptr<World> MakeShmWorld(WorldOptions options) {
  return std::make_unique<ShmWorld>(options);
}

Result<PullResult> PullAndWait(Transport& transport, const RouteKey& key, RouteEnd target,
                               PullOptions options) {
  const auto promise = std::make_shared<std::promise<Result<PullResult>>>();
  auto future = promise->get_future();
  transport.Pull(key, std::move(target), std::move(options),
                 [promise](Result<PullResult> result) { promise->set_value(std::move(result)); });
  if (future.wait_for(seconds(60)) != std::future_status::ready) {
    return Status(Code::kInternal, "the pull never ended");
  }
  return future.get();
}

PullOptions Unhurried(std::string peer, Proof proof) {
  return {.proof = proof,
          .deadline = steady_clock::now() + seconds(50),
          .peer = std::move(peer),
          .capability = testing::TestCapability()};
}

}  // namespace tensorbus::transport
