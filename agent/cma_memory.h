#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "agent/process_handle.h"
#include "agent/stage_pool.h"
#include "tensorbus/base/status.h"
#include "tensorbus/transport/foreign_memory.h"

namespace tensorbus::agent {

/// A stretch of a worker's address space.
struct PrivateSegment {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
};

/// The private memory of a process of this host, read and written in place with
/// process_vm_readv/writev: one copy by the kernel, nothing for the owner to do. Blocks' bases are
/// addresses in that process.
///
/// Threads: thread-safe.
class CmaMemory final : public transport::ForeignMemory {
 public:
  /// Makes sure, without changing a byte, that the kernel lets this process read the segments and,
  /// `writable`, write them.
  ///
  /// Errors: kPermissionDenied/kUnsupported with the reason, kUnavailable/kPeerLost,
  /// kInvalidArgument/kMalformed for segments that are not mapped (or not writable) there.
  static Result<std::shared_ptr<CmaMemory>> Create(ProcessHandle process,
                                                   std::span<const PrivateSegment> segments,
                                                   bool writable,
                                                   std::shared_ptr<StagePool> stages);

  std::uint64_t stage_bytes() const override { return stages_->stage_bytes(); }
  Result<transport::ForeignStage> Borrow(TimePoint deadline) override;
  Status Read(std::span<const transport::ForeignPart> parts, std::span<std::byte> out,
              TimePoint deadline) override;
  Status Write(std::span<const transport::ForeignPart> parts, std::span<const std::byte> in,
               TimePoint deadline) override;

  /// Measures a read of up to a stage of the largest segment, in 10^9 bytes a second; 0 when it
  /// could not.
  double MeasureSpeed(std::span<const PrivateSegment> segments);

 private:
  enum class Direction { kRead, kWrite };

  CmaMemory(ProcessHandle process, std::shared_ptr<StagePool> stages);
  Status Probe(std::span<const PrivateSegment> segments, bool writable);
  Status CheckWritable(std::span<const PrivateSegment> segments) const;
  Status Move(Direction direction, std::span<const transport::ForeignPart> parts,
              std::span<std::byte> local, TimePoint deadline);
  /// Moves all of `remote`, in order, from or into the front of `local`.
  Status MoveRuns(Direction direction, std::span<const PrivateSegment> remote,
                  std::span<std::byte> local);
  Status Refused(Direction direction, int error_number, std::uint64_t address) const;

  const ProcessHandle process_;
  const std::shared_ptr<StagePool> stages_;
};

}  // namespace tensorbus::agent
