#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::worker_shim {

/// One stretch of shared memory that a rank's tensors live in, so that the agent maps all of them
/// with one descriptor. Owns the memory; it must outlive everything that points into it.
///
/// From 64 MiB on it begins at a multiple of 2 MiB and asks for huge pages. Memory is handed out
/// once and never taken back: an arena is made for a model, not for churn.
///
/// Threads: thread-safe.
class Arena {
 public:
  static constexpr std::uint64_t kHugePageBytes = 2U << 20;
  static constexpr std::uint64_t kHugePagesFromBytes = 64U << 20;
  static constexpr std::uint64_t kAlignmentMax = kHugePageBytes;

  /// Makes `bytes` of zeroed memory, sealed against shrinking. Pages come on first touch.
  ///
  /// Errors: kInvalidArgument for 0 bytes; kResourceExhausted when there is no room.
  static Result<Arena> Create(std::uint64_t bytes);

  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) = delete;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  /// Offset of `bytes` unused bytes. `alignment` is a power of two up to kAlignmentMax.
  ///
  /// Errors: kResourceExhausted/kOutOfMemory when they do not fit, with what is left.
  Result<std::uint64_t> Allocate(std::uint64_t bytes, std::uint64_t alignment);

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  std::uint64_t used() const;
  int fd() const { return fd_.get(); }

 private:
  Arena(UniqueFd fd, std::byte* data, std::uint64_t size)
      : fd_(std::move(fd)), data_(data), size_(size) {}

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  mutable Mutex mutex_;
  std::uint64_t used_ TB_GUARDED_BY(mutex_) = 0;
};

}  // namespace tensorbus::worker_shim
