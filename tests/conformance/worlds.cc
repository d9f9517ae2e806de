#include "tests/conformance/worlds.h"

#include <chrono>
#include <future>
#include <utility>

#include "tensorbus/base/executor.h"
#include "tensorbus/transport/fake_transport.h"
#include "tensorbus/transport/shm_transport.h"
#include "tensorbus/transport/tcp_transport.h"

namespace tensorbus::transport {

using std::chrono::seconds;
using std::chrono::steady_clock;

namespace {

class FakeWorld final : public World {
 public:
  explicit FakeWorld(const WorldOptions& options)
      : source_(net_, executor_, {.endpoint = "fake://source"}),
        target_(net_, executor_,
                {.endpoint = "fake://target", .landing_hook = options.landing_hook}) {}
  Transport& source() override { return source_; }
  Transport& target() override { return target_; }
  std::string peer() override { return source_.endpoint(); }

 private:
  FakeNet net_;
  ThreadExecutor executor_{"fake"};
  FakeTransport source_;
  FakeTransport target_;
};

class ShmWorld final : public World {
 public:
  explicit ShmWorld(const WorldOptions& options)
      : shm_(ShmTransport::Create({.threads = 3, .landing_hook = options.landing_hook})) {}
  Transport& source() override { return *shm_; }
  Transport& target() override { return *shm_; }
  std::string peer() override { return ""; }

 private:
  std::unique_ptr<ShmTransport> shm_;
};

class TcpWorld final : public World {
 public:
  explicit TcpWorld(const WorldOptions& options)
      : staging_(StagingBudget::Create(options.staging_bytes)) {
    for (auto* end : {&source_, &target_}) {
      auto created = TcpTransport::Create(
          {.token = "conformance", .staging = staging_, .landing_hook = options.landing_hook});
      TB_CHECK(created.ok());
      *end = std::move(*created);
    }
  }
  Transport& source() override { return *source_; }
  Transport& target() override { return *target_; }
  std::string peer() override { return source_->endpoint(); }

 private:
  std::shared_ptr<StagingBudget> staging_;
  std::unique_ptr<TcpTransport> source_;
  std::unique_ptr<TcpTransport> target_;
};

}  // namespace

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
  return {.proof = proof, .deadline = steady_clock::now() + seconds(50), .peer = std::move(peer)};
}

}  // namespace tensorbus::transport
