#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/mapping.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "tensorbus/transport/foreign_memory.h"
#include "tensorbus/types/ids.h"
#include "worker_shim/wire.h"

namespace tensorbus::agent {

/// How the agent reaches the bytes of one rank: where each of its segments lies.
///
/// Threads: immutable. Lifetime: shared by the rank and by every session that reads or writes it,
/// so that a worker's death never pulls memory from under a running copy.
class MemoryAccess {
 public:
  virtual ~MemoryAccess() = default;

  virtual MemoryMode mode() const = 0;
  /// Whether `bases()` are addresses of this process. If not they are the worker's, and bytes move
  /// through foreign() only.
  virtual bool addressable() const { return true; }
  /// How to reach memory that is not addressable; null until a way was found, and for other memory.
  virtual std::shared_ptr<transport::ForeignMemory> foreign() const { return nullptr; }
  /// Rough speed as measured at registration, in 10^9 bytes a second; 0 if unknown.
  virtual double expected_gb_per_s() const { return 0; }
  /// Why this mode was chosen, for people.
  virtual const std::string& why() const = 0;
  /// First byte of each segment, in this process if `addressable()`.
  virtual std::span<std::byte* const> bases() const = 0;
  virtual std::span<const std::uint64_t> segment_bytes() const = 0;
};

/// What a worker announced about one segment.
struct SegmentOffer {
  wire::AttachSegment attach;
  UniqueFd fd;  ///< mapped segments only
};

/// Maps a shared object that another process made, after making sure that it cannot shrink any
/// more: a mapping of a file that is cut short would end this process with SIGBUS.
///
/// Errors: kFailedPrecondition/kUnsupported when it can still shrink and cannot be sealed;
/// kInvalidArgument when it is shorter than announced; kResourceExhausted.
Result<Mapping> MapForeign(int fd, std::uint64_t bytes, Mapping::Access access);

/// Memory of this process's own with the same segments as a rank's: a shadow or a snapshot. Pages
/// that no piece covers are never touched and so cost nothing.
///
/// Errors: kResourceExhausted/kOutOfMemory.
Result<std::shared_ptr<const MemoryAccess>> CreateTwin(
    std::string_view name, std::span<const std::uint64_t> segment_bytes);

/// Collects the segments of a rank while it attaches them.
///
/// Threads: confined to the agent's executor.
class SegmentCollector {
 public:
  /// `access` is kRead for a producer: its weights can then not be damaged from here.
  explicit SegmentCollector(Mapping::Access access) : access_(access) {}

  /// Takes the next segment and closes its descriptor. Errors: out of order, too many, no
  /// descriptor, as MapForeign(); kInvalidArgument for private memory at no address.
  Status Add(SegmentOffer offer);

  /// Everything added so far, as one rank's memory. With any private segment in it all of it is
  /// AnnouncedMemory(), mapped segments too: they lie in the worker's memory as well, and one rank
  /// is reached in one way. Empties the collector.
  std::shared_ptr<const MemoryAccess> Finish();

  std::size_t segment_count() const { return segments_.size(); }

 private:
  Mapping::Access access_;
  struct Segment {
    std::uint64_t address = 0;  ///< in the worker
    std::uint64_t bytes = 0;
    Mapping mapping;  ///< mapped segments only
  };

  std::vector<Segment> segments_;
  bool any_private_ = false;
};

}  // namespace tensorbus::agent
