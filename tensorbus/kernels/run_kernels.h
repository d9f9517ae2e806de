#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tensorbus/types/strided.h"

namespace tensorbus::kernels {

/// The leaf functions of one instruction set, each over one contiguous run of bytes at any
/// alignment. `offset` is the run's first byte in the tensor's stream. A table is immutable; its
/// functions are thread-safe and keep no state.
struct RunKernels {
  /// Pitches of memory (`source` of what is only read), target and stream.
  struct Rows {
    std::size_t bytes = 0;
    std::uint64_t count = 0;
    std::uint64_t source_pitch = 0;
    std::uint64_t target_pitch = 0;
    std::uint64_t offset_pitch = 0;
  };

  std::string_view name;

  /// Adds the run to `sum`.
  void (*digest)(DigestSum& sum, const DigestKey& key, const std::byte* memory,
                 std::uint64_t offset, std::size_t bytes);
  /// The same while fetching the `bytes` bytes at `ahead` into the second-level cache.
  void (*digest_ahead)(DigestSum& sum, const DigestKey& key, const std::byte* memory,
                       std::uint64_t offset, std::size_t bytes, const std::byte* ahead);
  /// Copies and digests what was loaded; the target's lines end up in cache.
  void (*copy_digest)(DigestSum& sum, const DigestKey& key, std::byte* target,
                      const std::byte* source, std::uint64_t offset, std::size_t bytes);
  /// `digest` and `copy_digest` for `count` runs of `bytes` bytes, run k each `pitch` further on.
  /// Made for short rows: a digest block's sums are finished once, not once a row.
  void (*digest_rows)(DigestSum& sum, const DigestKey& key, const Rows& rows,
                      const std::byte* memory, std::uint64_t offset);
  void (*copy_digest_rows)(DigestSum& sum, const DigestKey& key, const Rows& rows,
                           std::byte* target, const std::byte* source, std::uint64_t offset);
  /// Copies past the cache and digests what was loaded. Call `fence` before the bytes are
  /// announced.
  void (*stream_digest)(DigestSum& sum, const DigestKey& key, std::byte* target,
                        const std::byte* source, std::uint64_t offset, std::size_t bytes);
  void (*copy)(std::byte* target, const std::byte* source, std::size_t bytes);
  void (*stream)(std::byte* target, const std::byte* source, std::size_t bytes);
  /// Orders streaming stores before every later store.
  void (*fence)();
};

/// Plain C++, for every machine.
const RunKernels& PortableKernels();
/// Null when this build has none for the machine it runs on.
const RunKernels* Avx2Kernels();
/// The fastest this machine can run; chosen once.
const RunKernels& BestKernels();

}  // namespace tensorbus::kernels
