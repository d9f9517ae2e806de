#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tensorbus/base/mapping.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "tensorbus/types/piece.h"
#include "tensorbus/types/strided.h"
#include "worker_shim/wire.h"

namespace tensorbus::worker_shim {

/// Gathers pieces of private memory into the agent's shared buckets and scatters them back: the
/// worker's half of bucket mode. Trusts no number the agent sends. Thread-safe.
class BucketService {
 public:
  /// Most buckets at a time, and most bytes of one.
  static constexpr std::uint32_t kBucketsMax = 1024;
  static constexpr std::uint64_t kBucketBytesMax = std::uint64_t{4} << 30;

  /// The memory behind piece numbers: a validated registration and where its segments begin. Both
  /// are copied; the memory is borrowed. Forgets all buckets: what was ordered for the pieces
  /// before is refused.
  void SetMemory(const Registration& registration, std::vector<std::byte*> segments);

  /// Maps one bucket; a number that comes again replaces it.
  Status Attach(const wire::AttachBucket& bucket, UniqueFd fd);

  /// All ranges are checked before the first byte moves.
  Status Pack(const wire::BucketWork& work);
  Status Unpack(const wire::BucketWork& work);

  /// Unmaps all buckets: their agent is gone.
  void DropBuckets();

 private:
  Status Check(const wire::BucketWork& work) const TB_REQUIRES(mutex_);
  StridedBlock BlockOf(const wire::BucketRange& range) const TB_REQUIRES(mutex_);

  Mutex mutex_;
  Registration registration_ TB_GUARDED_BY(mutex_);
  std::vector<std::byte*> segments_ TB_GUARDED_BY(mutex_);
  std::map<std::uint32_t, Mapping> buckets_ TB_GUARDED_BY(mutex_);
};

}  // namespace tensorbus::worker_shim
