#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "tensorbus/base/executor.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/exposure.h"
#include "tensorbus/transport/landing.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// The world in which fake transports find each other by endpoint. Thread-safe; shared by them.
class FakeNet {
 public:
  /// The sources exposed at `endpoint`; null when nobody is there.
  std::shared_ptr<ExposureTable> Find(const std::string& endpoint) const;
  void Join(const std::string& endpoint, std::shared_ptr<ExposureTable> sources);
  /// From now on pulls from `endpoint` fail with kPeerLost, as if its process had died.
  void Leave(const std::string& endpoint);

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<ExposureTable>> nodes_ TB_GUARDED_BY(mutex_);
};

struct FakeOptions {
  std::string endpoint = "fake://node";
  std::uint64_t step_bytes = 64 << 10;  ///< bytes moved per executor task
  LandingHook landing_hook = nullptr;
};

/// Moves bytes inside one process, a step per executor task: one thread, no clock but the
/// executor's, the same order in every run. For tests and simulations. Executor and net must
/// outlive it; tasks still posted when it is destroyed end their pulls with kCancelled.
class FakeTransport final : public Transport {
 public:
  FakeTransport(FakeNet& net, Executor& executor, FakeOptions options);
  ~FakeTransport() override;
  FakeTransport(const FakeTransport&) = delete;
  FakeTransport& operator=(const FakeTransport&) = delete;

  std::string_view name() const override { return "fake"; }
  std::string endpoint() const override;
  Status Expose(const RouteKey& key, RouteEnd source) override;
  void Withdraw(const RouteKey& key) override;
  void Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) override;
  void Cancel(SessionId session) override;

 private:
  struct Job;
  struct State;

  /// Starts a job, then moves one step per task until it is over.
  static void Step(const std::shared_ptr<State>& state, const std::shared_ptr<Job>& job);
  static void MoveOne(const State& state, Job& job);
  static void Finish(State& state, const std::shared_ptr<Job>& job);

  std::shared_ptr<State> state_;
};

}  // namespace tensorbus::transport
