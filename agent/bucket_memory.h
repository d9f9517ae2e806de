#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "agent/binding.h"
#include "agent/bucket_channel.h"
#include "tensorbus/base/mapping.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/foreign_memory.h"
#include "tensorbus/transport/staging_budget.h"

namespace tensorbus::agent {

/// The private memory of a worker that this process may not touch: the worker itself packs it into
/// buckets, shared memory that this agent owns, and unpacks it from them. Blocks' bases are
/// addresses in the worker, and serve to tell its pieces apart.
///
/// A stage is a bucket, so bytes that pass through one are copied once on each side of it. The
/// buckets are counted in the staging budget for as long as this lives.
///
/// Threads: thread-safe.
class BucketMemory final : public transport::ForeignMemory,
                           public std::enable_shared_from_this<BucketMemory> {
 public:
  static constexpr std::size_t kBuckets = 2;  ///< one is packed while the other is copied
  static constexpr std::uint64_t kBucketBytes = std::uint64_t{4} << 20;
  static constexpr std::uint64_t kBucketBytesMin = std::uint64_t{64} << 10;

  /// `bases` says where the worker's segments begin there. Buckets are as large as a sixteenth of
  /// the budget allows.
  ///
  /// Error: kResourceExhausted/kOutOfMemory when half of the budget is taken by others' buckets or
  /// stages.
  static Result<std::shared_ptr<BucketMemory>> Create(
      std::shared_ptr<BucketChannel> channel, std::shared_ptr<const PieceIndex> pieces,
      std::vector<std::byte*> bases, std::shared_ptr<transport::StagingBudget> budget);

  std::uint64_t stage_bytes() const override { return bucket_bytes_; }
  Result<transport::ForeignStage> Borrow(TimePoint deadline) override;
  Status Read(std::span<const transport::ForeignPart> parts, std::span<std::byte> out,
              TimePoint deadline) override;
  Status Write(std::span<const transport::ForeignPart> parts, std::span<const std::byte> in,
               TimePoint deadline) override;

  /// Has the worker pack up to a bucket of its first pieces: shows that it does, and how fast, in
  /// 10^9 bytes a second.
  Result<double> MeasureSpeed(TimePoint deadline);

 private:
  struct Bucket {
    transport::StagingBudget::Lease lease;
    Mapping memory;
    bool lent = false;
    bool spoilt = false;  ///< an order on it was given up: the worker may still use it
  };
  /// Where a span lies in a bucket.
  struct Place {
    std::uint32_t bucket = 0;
    std::uint64_t offset = 0;
  };

  BucketMemory(std::shared_ptr<BucketChannel> channel, std::shared_ptr<const PieceIndex> pieces,
               std::vector<std::byte*> bases);
  Status MakeBuckets(transport::StagingBudget& budget);
  Status Renew(std::uint32_t number) TB_REQUIRES(mutex_);
  void Return(std::uint32_t number);
  std::optional<Place> PlaceOf(std::span<const std::byte> span);
  /// The piece and box behind a block.
  Result<wire::BucketRange> RangeOf(const StridedBlock& block) const;
  Status Ask(wire::MessageType type, std::span<const transport::ForeignPart> parts, Place place,
             TimePoint deadline);
  /// Calls `move(parts, offset, bucket bytes)` for stretches that fit a bucket of its own.
  template <typename Move>
  Status ThroughBucket(std::span<const transport::ForeignPart> parts, TimePoint deadline,
                       const Move& move);

  const std::shared_ptr<BucketChannel> channel_;
  const std::shared_ptr<const PieceIndex> pieces_;
  const std::vector<std::byte*> bases_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> tensors_by_key_;
  std::uint64_t bucket_bytes_ = 0;
  Mutex mutex_;
  CondVar returned_;
  std::array<Bucket, kBuckets> buckets_ TB_GUARDED_BY(mutex_);
};

}  // namespace tensorbus::agent
