#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"

namespace tensorbus::transport {

/// Counts the memory an agent holds for bytes on their way, and never lets it exceed the bound.
/// Thread-safe; shared by everything in an agent that stages bytes.
class StagingBudget : public std::enable_shared_from_this<StagingBudget> {
 public:
  static constexpr std::uint64_t kDefaultBytes = std::uint64_t{256} << 20;

  /// A share of the budget; gives it back when it dies. Move-only. Keeps the budget alive.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease();

    std::uint64_t bytes() const { return bytes_; }

   private:
    friend class StagingBudget;
    Lease(std::shared_ptr<StagingBudget> budget, std::uint64_t bytes);

    std::shared_ptr<StagingBudget> budget_;
    std::uint64_t bytes_ = 0;
  };

  static std::shared_ptr<StagingBudget> Create(std::uint64_t bytes = kDefaultBytes);

  /// Waits until `bytes` are free. First come, first served.
  ///
  /// Errors: kResourceExhausted/kOutOfMemory at once when `bytes` exceeds the whole budget;
  /// kDeadlineExceeded/kOutOfMemory when they did not become free in time.
  Result<Lease> Acquire(std::uint64_t bytes, TimePoint deadline);
  /// The same without waiting, and not before those who wait. Error:
  /// kResourceExhausted/kOutOfMemory.
  Result<Lease> TryAcquire(std::uint64_t bytes);

  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t used_bytes() const;
  /// The most that was ever used at once; for metrics and tests.
  std::uint64_t used_bytes_max() const;

 private:
  explicit StagingBudget(std::uint64_t bytes) : limit_bytes_(bytes) {}
  void Release(std::uint64_t bytes);
  Lease Take(std::uint64_t bytes) TB_REQUIRES(mutex_);

  const std::uint64_t limit_bytes_;
  mutable Mutex mutex_;
  CondVar released_;
  std::uint64_t used_bytes_ TB_GUARDED_BY(mutex_) = 0;
  std::uint64_t used_bytes_max_ TB_GUARDED_BY(mutex_) = 0;
  std::uint64_t next_ticket_ TB_GUARDED_BY(mutex_) = 0;
  std::deque<std::uint64_t> waiting_ TB_GUARDED_BY(mutex_);  // tickets, in order of arrival
};

}  // namespace tensorbus::transport
