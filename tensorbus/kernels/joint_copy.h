#pragma once

#include <cstddef>
#include <span>

#include "tensorbus/kernels/copy.h"

namespace tensorbus::kernels {

/// One of several copies that are made in one pass over their sources' memory.
struct JointCopy {
  const StridedBlock* source = nullptr;
  const StridedBlock* target = nullptr;
  const StridedBlock* check = nullptr;  ///< where the target is read back
  ByteRange range;
  CopySums sums;  ///< of this call; `target` only by CopyJointReadback()
};

/// Most copies of one call.
inline constexpr std::size_t kJointMax = 16;

/// Copies blocks whose sources lie among each other: shards of one tensor that several targets
/// take, or one shard that several replicas take. The next group is always that of the copy whose
/// source comes first in memory, so that memory is read front to back once, whatever the targets
/// are; what two copies share comes from cache the second time.
///
/// Any copies may be put together: order changes no byte and no sum. Targets must overlap neither
/// each other nor a source.
void CopyJoint(std::span<JointCopy> copies, StoreKind store = StoreKind::kAuto);
/// The same with the source's digest, as CopyRangeDigest().
void CopyJointDigest(std::span<JointCopy> copies, StoreKind store = StoreKind::kAuto);
/// The same with every group read back, as CopyRangeReadback().
void CopyJointReadback(std::span<JointCopy> copies);

}  // namespace tensorbus::kernels
