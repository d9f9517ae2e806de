#pragma once

#include <cstddef>
#include <cstdint>

#include "tensorbus/kernels/run_kernels.h"
#include "tensorbus/kernels/walk.h"

namespace tensorbus::kernels {

/// Bytes that are copied, and then read back, in one go: small enough that the group and the source
/// of the next one stay in the first-level cache.
inline constexpr std::uint64_t kGroupBytes = 4096;
/// Shorter runs than this are collected in a group of their own before they are digested.
inline constexpr std::uint64_t kDirectRunBytes = 64;

/// Bytes of the next group: it ends where a digest block of the stream ends when the run goes on
/// that far.
inline std::uint64_t GroupLength(std::uint64_t left, std::uint64_t left_in_run,
                                 std::uint64_t stream_at) {
  std::uint64_t limit = kGroupBytes;
  if (left_in_run >= kGroupBytes) limit -= stream_at % kGroupBytes;
  return left < limit ? left : limit;
}

/// Digests the next `bytes` of a walk over memory and stream.
inline void DigestWalk(const RunKernels& run, DigestSum& sum, const DigestKey& key, Walk<2>& walk,
                       std::uint64_t bytes) {
  while (bytes != 0) {
    const auto rows = walk.Next(bytes);
    bytes -= rows.bytes * rows.count;
    const std::byte* memory = PointerAt(rows.at[0]);
    if (rows.count == 1) {
      run.digest(sum, key, memory, rows.at[1], static_cast<std::size_t>(rows.bytes));
      continue;
    }
    run.digest_rows(sum, key,
                    {.bytes = static_cast<std::size_t>(rows.bytes),
                     .count = rows.count,
                     .source_pitch = rows.pitch[0],
                     .offset_pitch = rows.pitch[1]},
                    memory, rows.at[1]);
  }
}

/// Digests `bytes` packed bytes at the places the next part of a stream walk gives.
inline void DigestPacked(const RunKernels& run, DigestSum& sum, const DigestKey& key,
                         const std::byte* packed, Walk<1>& stream, std::uint64_t bytes) {
  while (bytes != 0) {
    const auto rows = stream.Next(bytes);
    for (std::uint64_t k = 0; k < rows.count; ++k) {
      run.digest(sum, key, packed, rows.at[0] + k * rows.pitch[0],
                 static_cast<std::size_t>(rows.bytes));
      packed += rows.bytes;
    }
    bytes -= rows.bytes * rows.count;
  }
}

}  // namespace tensorbus::kernels
