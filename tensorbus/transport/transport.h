#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/transport/capability.h"
#include "tensorbus/transport/foreign_memory.h"
#include "tensorbus/types/ids.h"
#include "tensorbus/types/strided.h"

namespace tensorbus::transport {

/// Names one route of one session: all that goes from one source rank to one target rank.
struct RouteKey {
  SessionId session;
  std::uint32_t source_rank = 0;
  std::uint32_t target_rank = 0;

  friend auto operator<=>(const RouteKey&, const RouteKey&) = default;
};

/// One end of a route: its copy ops in plan order, each a block of memory: this process's, or that
/// behind `memory`.
///
/// The route's byte stream is the blocks' bytes one after the other, each block row-major over its
/// extents; both ends describe the same stream, cut in memory as it pleases them. Block i of one
/// end and block i of the other are the same box of the same tensor.
struct RouteEnd {
  std::vector<StridedBlock> blocks = {};
  /// Optional, target end only: further places that block `first` is written to as well (aliases).
  struct Alias {
    std::uint32_t block = 0;
    StridedBlock place;
    /// Where `place` is read back, as `RouteEnd::readback`; none: there.
    std::optional<StridedBlock> readback = std::nullopt;

    const StridedBlock& check() const { return readback.has_value() ? *readback : place; }
  };
  std::vector<Alias> aliases = {};
  /// Optional, target end only: where each block is read back for its check, as somebody else
  /// computed it (from the target's registration, not from the plan's ops). Empty: the blocks
  /// themselves. Same extents as `blocks`.
  std::vector<StridedBlock> readback = {};
  /// Where all these blocks lie when this process cannot address them; null: in its own memory.
  std::shared_ptr<ForeignMemory> memory = nullptr;
  /// Source end only: how long `memory` may be waited for, whoever pulls; its session's deadline.
  TimePoint deadline = TimePoint::max();
  /// Source end only, required: what a pull must show.
  Capability capability = {};

  std::uint64_t bytes() const;
};

/// What one end of a route saw: a sum per block, in block order.
struct RouteReceipt {
  std::vector<DigestSum> blocks;

  DigestSum total() const;
};

/// What a finished Pull() brought.
struct PullResult {
  RouteReceipt source;  ///< of the bytes as they left the source's memory
  RouteReceipt target;  ///< of the bytes read back from the target's memory (equal to `source`
                        ///< unless kReadback)
  Nanos first_byte{};   ///< steady-clock time since epoch of the first byte read and the last byte
                        ///< checked
  Nanos last_byte{};
};

struct PullOptions {
  Proof proof = Proof::kReadback;
  TimePoint deadline;
  std::string
      peer;  ///< where the source's transport listens, as its endpoint() said; "" for this process
  Capability capability = {};  ///< of the session; what the source was exposed with
  /// Other pulls of this session, out of the same source rank, follow at once, and the last of them
  /// has this not set: a transport may begin them together. Until then none need begin.
  bool more_follow = false;
};

/// Moves the bytes of routes from exposed sources to local targets.
///
/// A Transport knows nothing about tensors, versions or plans: it executes routes that somebody
/// else decided on. The target's side pulls; the source's side only allows it. With proof kReadback
/// a block whose two sums differ fails the pull with kChecksumMismatch, the message naming the
/// block's index.
///
/// Threads: thread-safe. Done runs exactly once per Pull(), on a thread of the transport, never
/// inside Pull(). Lifetime: the memory behind a RouteEnd must stay valid until Withdraw() returned
/// (source) or Done ran (target).
class Transport {
 public:
  using Done = std::function<void(Result<PullResult>)>;

  virtual ~Transport() = default;

  /// "shm", "tcp", …; a closed set, also used as a metric label.
  virtual std::string_view name() const = 0;
  /// Where peers reach this transport ("tcp://10.0.0.1:4711"); "" when only this process can.
  virtual std::string endpoint() const = 0;

  /// Allows `key` to be pulled, by whoever shows the end's capability, until Withdraw(). Errors:
  /// kAlreadyExists; kInvalidArgument without a capability.
  virtual Status Expose(const RouteKey& key, RouteEnd source) = 0;
  /// Ends the permission and returns once no byte of the source is read any more. Unknown keys are
  /// fine.
  virtual void Withdraw(const RouteKey& key) = 0;

  /// Starts to bring the whole route into `target` and returns at once.
  ///
  /// `done` gets the receipts once every byte is in place and, by the proof, checked; or the first
  /// failure: kNotFound (not exposed there), kPermissionDenied (exposed with another
  /// capability; no byte of the source is read then), kInvalidArgument/kPlanMismatch (the two ends
  /// differ in bytes or blocks), kUnavailable/kPeerLost, kDeadlineExceeded, kCancelled,
  /// kDataLoss/kChecksumMismatch. After a failure the target's bytes are undefined.
  virtual void Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) = 0;

  /// Fails every pull of `session` that is not done with kCancelled. Idempotent.
  virtual void Cancel(SessionId session) = 0;
};

}  // namespace tensorbus::transport
