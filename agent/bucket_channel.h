#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "worker_shim/wire.h"

namespace tensorbus::agent {

/// Asks one worker to pack and unpack buckets, and waits for its answers.
///
/// A worker serves in order and only while it waits, polls or has its service thread; so an order
/// that was given up may still be carried out, but never after a later one.
///
/// Threads: thread-safe. Ask() blocks; OnDone() and Close() come from the thread that hears the
/// worker.
class BucketChannel {
 public:
  using SendFrame = std::function<void(wire::MessageType type, std::uint64_t request,
                                       std::vector<std::byte> body, std::vector<UniqueFd> fds)>;

  /// `owner` names the worker in messages. `number` tells its orders from those of the worker's
  /// other channels, before and after. No order waits longer than `patience`.
  BucketChannel(std::string owner, std::uint64_t number, SendFrame send, Nanos patience);

  /// Gives the worker a bucket; a number that comes again replaces the older one.
  void Attach(const wire::AttachBucket& bucket, UniqueFd fd);

  /// Has `work` done. `type` is kPack or kUnpack.
  ///
  /// Errors: kDeadlineExceeded/kMissingRank, naming the worker and the remedy; kUnavailable/
  /// kPeerLost once closed; what the worker refused.
  Status Ask(wire::MessageType type, const wire::BucketWork& work, TimePoint deadline);

  /// The worker's answer. One that nobody waits for any more is dropped.
  void OnDone(std::uint64_t request, const Status& status);
  /// The connection is gone: what waits, and all that comes, fails with `why`.
  void Close(const Status& why);

  const std::string& owner() const { return owner_; }

 private:
  TimePoint GiveUpAt(TimePoint deadline) const;

  const std::string owner_;
  const SendFrame send_;
  const Nanos patience_;
  Mutex mutex_;
  CondVar answered_;
  std::uint64_t next_request_ TB_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::optional<Status>> waiting_ TB_GUARDED_BY(mutex_);
  Status closed_ TB_GUARDED_BY(mutex_);
};

}  // namespace tensorbus::agent
