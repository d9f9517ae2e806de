#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/stream_map.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// Counts who works on something that may be taken away. Thread-safe. Whoever entered leaves again
/// without waiting for anything but the work itself, so CloseAndWait() is short.
class AccessGate {
 public:
  /// False once closed.
  bool Enter();
  void Leave();
  /// Lets nobody in any more and returns when everybody left. Not from inside. Says in the log,
  /// again and again, when that takes longer than it should: returning before would free what is
  /// read.
  void CloseAndWait();

 private:
  /// Who is inside still, when it becomes nobody or at `deadline`.
  std::uint64_t CloseAndWaitUntil(TimePoint deadline);

  Mutex mutex_;
  CondVar idle_;
  std::uint64_t inside_ TB_GUARDED_BY(mutex_) = 0;
  bool closed_ TB_GUARDED_BY(mutex_) = false;
};

/// Holds an AccessGate for a scope; false when it was closed.
class AccessScope {
 public:
  explicit AccessScope(AccessGate& gate) : gate_(gate.Enter() ? &gate : nullptr) {}
  ~AccessScope() {
    if (gate_ != nullptr) gate_->Leave();
  }
  AccessScope(const AccessScope&) = delete;
  AccessScope& operator=(const AccessScope&) = delete;
  explicit operator bool() const { return gate_ != nullptr; }

 private:
  AccessGate* gate_;
};

/// One exposed source. Immutable but for its gate; its memory is read inside the gate only.
struct Exposure {
  explicit Exposure(RouteEnd source);

  const RouteEnd end;
  const std::uint64_t shape;  ///< ShapeOf(end)
  const StreamMap map;
  AccessGate gate;
};

/// The sources of one transport. Thread-safe.
class ExposureTable {
 public:
  /// Error: kAlreadyExists; kInvalidArgument when the end is malformed or has no capability.
  Status Add(const RouteKey& key, RouteEnd source);
  /// Null when there is none. Whoever reads it must have been shown its capability.
  std::shared_ptr<Exposure> Find(const RouteKey& key) const;
  /// The source, for a pull of this process. Errors: NotExposed(), NotAllowed().
  Result<std::shared_ptr<Exposure>> Open(const RouteKey& key, const Capability& shown) const;
  /// Forgets the source and returns once nobody reads it.
  void Remove(const RouteKey& key);

 private:
  mutable Mutex mutex_;
  std::map<RouteKey, std::shared_ptr<Exposure>> exposures_ TB_GUARDED_BY(mutex_);
};

/// The failures of a pull whose source is not exposed, is exposed to others, or is not exposed any
/// longer.
Status NotExposed(const RouteKey& key);
Status NotAllowed(const RouteKey& key);
Status WithdrawnMeanwhile(const RouteKey& key);

}  // namespace tensorbus::transport
