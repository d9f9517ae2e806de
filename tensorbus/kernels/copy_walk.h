#pragma once

#include <cstddef>
#include <cstdint>

#include "tensorbus/kernels/copy.h"
#include "tensorbus/kernels/digest_walk.h"

// What copies of one block and of several have in common: the two halves of a checked group.
namespace tensorbus::kernels {

using CopyWalk = Walk<3>;  // source memory, target memory, source stream

inline CopyWalk MakeCopyWalk(const StridedBlock& source, const StridedBlock& target) {
  return {source,
          {&source.strides, &target.strides, &source.stream_strides},
          {AddressOf(source), AddressOf(target), source.stream_offset}};
}

/// From here on a transfer does not fit the last-level cache of ordinary machines.
inline constexpr std::uint64_t kStreamBytes = std::uint64_t{16} << 20;
/// Shorter runs are not worth a streaming store: their lines would be written in halves.
inline constexpr std::uint64_t kStreamRunBytes = 256;

inline bool Streams(StoreKind store, std::uint64_t bytes, std::uint64_t run_bytes) {
  if (run_bytes < kStreamRunBytes) return false;
  return store == StoreKind::kStream || (store == StoreKind::kAuto && bytes >= kStreamBytes);
}

/// Copies and digests the next `bytes` of the walk, through the cache.
inline void CopyGroup(const RunKernels& run, DigestSum& sum, const DigestKey& key, CopyWalk& walk,
                      std::uint64_t bytes) {
  while (bytes != 0) {
    const auto rows = walk.Next(bytes);
    bytes -= rows.bytes * rows.count;
    std::byte* target = PointerAt(rows.at[1]);
    const std::byte* source = PointerAt(rows.at[0]);
    if (rows.count == 1) {
      run.copy_digest(sum, key, target, source, rows.at[2], static_cast<std::size_t>(rows.bytes));
      continue;
    }
    run.copy_digest_rows(sum, key,
                         {.bytes = static_cast<std::size_t>(rows.bytes),
                          .count = rows.count,
                          .source_pitch = rows.pitch[0],
                          .target_pitch = rows.pitch[1],
                          .offset_pitch = rows.pitch[2]},
                         target, source, rows.at[2]);
  }
}

/// Reads the target through its own addresses while what is at `ahead`, as many bytes, is fetched;
/// null: nothing is.
inline void CheckGroup(const RunKernels& run, DigestSum& sum, const DigestKey& key, Walk<2>& walk,
                       std::uint64_t bytes, const std::byte* ahead) {
  if (ahead == nullptr || walk.left_in_run() < bytes) {
    DigestWalk(run, sum, key, walk, bytes);
    return;
  }
  const auto rows = walk.Next(bytes);
  run.digest_ahead(sum, key, PointerAt(rows.at[0]), rows.at[1],
                   static_cast<std::size_t>(rows.bytes), ahead);
}

/// Fetches the source of the next group when it comes in short runs.
inline void PrefetchGroup(CopyWalk walk, std::uint64_t bytes) {
  while (bytes != 0) {
    const auto rows = walk.Next(bytes);
    for (std::uint64_t k = 0; k < rows.count; ++k) {
      const std::byte* row = PointerAt(rows.at[0] + k * rows.pitch[0]);
      for (std::uint64_t at = 0; at < rows.bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
    bytes -= rows.bytes * rows.count;
  }
}

}  // namespace tensorbus::kernels
