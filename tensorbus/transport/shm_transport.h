#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/exposure.h"
#include "tensorbus/transport/joint_plan.h"
#include "tensorbus/transport/landing.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

struct ShmOptions {
  unsigned threads = 0;                               ///< 0: one per core
  std::uint64_t part_bytes = std::uint64_t{1} << 20;  ///< work between two looks at the deadline
  /// Pulls of at least so many bytes write past the cache (below kReadback).
  std::uint64_t stream_bytes = std::uint64_t{32} << 20;
  LandingHook landing_hook = nullptr;  ///< for tests
};

/// Copies between memories on this host: both ends of a route are exposed to and pulled by one
/// agent. Mapped memory is copied straight, foreign memory through stages. Pulls that are begun
/// together read their source's memory front to back once and feed all their targets from it. A
/// bounded set of threads shares the parts of all that is under way in turn.
class ShmTransport final : public Transport {
 public:
  static std::unique_ptr<ShmTransport> Create(ShmOptions options = {});
  /// Fails what is not done with kCancelled, runs its Done, joins the threads.
  ~ShmTransport() override;
  ShmTransport(const ShmTransport&) = delete;
  ShmTransport& operator=(const ShmTransport&) = delete;

  std::string_view name() const override { return "shm"; }
  std::string endpoint() const override { return ""; }
  Status Expose(const RouteKey& key, RouteEnd source) override;
  void Withdraw(const RouteKey& key) override;
  void Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) override;
  void Cancel(SessionId session) override;

 private:
  struct Member;
  struct Job;

  explicit ShmTransport(ShmOptions options);
  std::shared_ptr<Job> MakeJob(std::vector<std::unique_ptr<Member>> members) const;
  void Work();
  /// The next job in turn that has work to hand out; with it a part, or none when only its end is
  /// to be reported.
  std::shared_ptr<Job> NextJob(std::size_t& part) TB_REQUIRES(mutex_);
  void RunPart(Job& job, std::size_t part);
  void RunSlice(Job& job, std::span<const JointPlan::Item> slice,
                const std::vector<bool>& open) const;

  const ShmOptions options_;
  ExposureTable exposures_;
  Mutex mutex_;
  CondVar work_;
  bool stopping_ TB_GUARDED_BY(mutex_) = false;
  std::size_t turn_ TB_GUARDED_BY(mutex_) = 0;
  /// Pulls that others of the same source follow.
  std::map<std::pair<SessionId, std::uint32_t>, std::vector<std::unique_ptr<Member>>> held_
      TB_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Job>> waiting_ TB_GUARDED_BY(mutex_);  // have parts to hand out
  std::vector<std::shared_ptr<Job>> running_ TB_GUARDED_BY(mutex_);  // all parts handed out
  std::vector<std::jthread> threads_;
};

}  // namespace tensorbus::transport
