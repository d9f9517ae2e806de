#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/landing.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// One accepted Pull() from start to Done: what is still missing, the receipts, the first failure,
/// and who is writing into the target right now. Thread-safe; shared by the threads of a transport.
///
/// Done runs exactly once, from Report(), after the last byte or the first failure and never while
/// somebody is between Enter() and Leave(): after Done the target's memory may go away.
class PullState {
 public:
  PullState(const RouteKey& key, RouteEnd target, PullOptions options, Transport::Done done);

  const RouteKey& key() const { return key_; }
  const TargetEnd& target() const { return target_; }
  const PullOptions& options() const { return options_; }
  std::uint64_t bytes() const { return bytes_; }

  /// Begins a stretch of work on the target. False when the pull is over: leave the target alone.
  bool Enter();
  void Leave();

  /// Records a part that arrived; a part that is not intact fails the pull.
  void Add(std::uint32_t block, const Landing& landing);
  /// Records the first failure; later ones, and those of a finished pull, are dropped.
  void Fail(Status status);
  /// Fails with kDeadlineExceeded when `now` is past the deadline.
  void CheckDeadline(TimePoint now);
  /// Fails with kCancelled.
  void Cancel();

  bool failed() const;
  /// Whether Done may run: every byte arrived, or it failed; and nobody is inside.
  bool over() const;
  /// Whether all bytes arrived and nothing failed.
  bool complete() const;

  /// Runs Done if over() and it did not run yet. Before that, with proof kMemory, reads all of the
  /// target once more. On a thread of the transport, not between Enter() and Leave(). True when
  /// Done ran in this call.
  bool Report();

 private:
  /// Sums of places of the target, read from memory. Error: kDeadlineExceeded, or ForeignMemory's.
  Status SumPlaces(std::span<const StridedBlock> places, std::vector<DigestSum>& sums) const;
  /// kMemory's pass over the whole target. Error: kChecksumMismatch naming the block.
  Status CheckMemory();

  const RouteKey key_;
  const TargetEnd target_;
  const PullOptions options_;
  const std::uint64_t bytes_;

  mutable Mutex mutex_;
  Transport::Done done_ TB_GUARDED_BY(mutex_);
  std::uint64_t inside_ TB_GUARDED_BY(mutex_) = 0;
  std::uint64_t left_bytes_ TB_GUARDED_BY(mutex_);
  bool reported_ TB_GUARDED_BY(mutex_) = false;
  Status failure_ TB_GUARDED_BY(mutex_);
  PullResult result_ TB_GUARDED_BY(mutex_);
};

}  // namespace tensorbus::transport
