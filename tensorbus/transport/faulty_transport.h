#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tensorbus/base/executor.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/landing.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// One thing that goes wrong with one pull.
struct Fault {
  enum class Kind {
    kFlipBit,       ///< bit 0 of byte `byte` of block `block`, after it landed
    kDropBlock,     ///< `block` goes nowhere
    kRepeatBlock,   ///< `block` is also written where `other` belongs, which goes nowhere
    kSwapBlocks,    ///< `block` and `other` (same shape) land in each other's place
    kShiftRow,      ///< every part of `block` lands one row further on, the last row first
    kAckEarly,      ///< success is reported though nothing lands
    kLoseReceipts,  ///< success is reported without receipts
    kFail,          ///< the pull fails with `status` and moves nothing
    kDelay,         ///< nothing happens until the session is cancelled or the deadline passes
  };

  Kind kind = Kind::kFail;
  std::uint64_t pull = 0;  ///< which Pull() of the decorator, counted from 0
  std::uint32_t block = 0;
  std::uint32_t other = 0;
  std::uint64_t byte = 0;
  Status status = Status(Code::kUnavailable, "injected", Reason::kPeerLost);
};

/// Faults for a FaultyTransport, and the hook through which the transport inside damages memory
/// between landing and check. Thread-safe.
class FaultPlan : public std::enable_shared_from_this<FaultPlan> {
 public:
  static std::shared_ptr<FaultPlan> Create(std::vector<Fault> faults);

  /// For the options of the transport that is decorated. Keeps the plan alive.
  LandingHook Hook();

 private:
  friend class FaultyTransport;

  explicit FaultPlan(std::vector<Fault> faults);
  /// The faults of the next pull; those that damage memory are armed for its route.
  std::vector<Fault> NextPull(const RouteKey& key);
  void Damage(const RouteKey& key, std::uint32_t block, const StridedBlock& place,
              kernels::ByteRange range);

  const std::vector<Fault> faults_;
  Mutex mutex_;
  std::uint64_t pulls_ TB_GUARDED_BY(mutex_) = 0;
  std::map<RouteKey, std::vector<Fault>> armed_ TB_GUARDED_BY(mutex_);
};

/// Passes everything on to another transport, except what its plan says. Misplaced and dropped
/// blocks are given to it as wrong addresses, while the places to read back stay right: the same
/// difference a bug in the copying half would make. The executor must outlive it and is where held
/// pulls end.
class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, std::shared_ptr<FaultPlan> plan,
                  Executor& executor);
  /// Ends held pulls with kCancelled.
  ~FaultyTransport() override;
  FaultyTransport(const FaultyTransport&) = delete;
  FaultyTransport& operator=(const FaultyTransport&) = delete;

  /// The inner transport's: nobody is meant to tell the difference.
  std::string_view name() const override { return inner_->name(); }
  std::string endpoint() const override { return inner_->endpoint(); }
  Status Expose(const RouteKey& key, RouteEnd source) override;
  void Withdraw(const RouteKey& key) override;
  void Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) override;
  void Cancel(SessionId session) override;

 private:
  struct Held;

  void Hold(const RouteKey& key, TimePoint deadline, Done done);

  const std::unique_ptr<Transport> inner_;
  const std::shared_ptr<FaultPlan> plan_;
  Executor& executor_;
  Mutex mutex_;
  std::vector<std::shared_ptr<Held>> held_ TB_GUARDED_BY(mutex_);
};

}  // namespace tensorbus::transport
