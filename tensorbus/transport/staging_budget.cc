#include "tensorbus/transport/staging_budget.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

namespace tensorbus::transport {

StagingBudget::Lease::Lease(std::shared_ptr<StagingBudget> budget, std::uint64_t bytes)
    : budget_(std::move(budget)), bytes_(bytes) {}

StagingBudget::Lease::Lease(Lease&& other) noexcept
    : budget_(std::move(other.budget_)), bytes_(std::exchange(other.bytes_, 0)) {}

StagingBudget::Lease& StagingBudget::Lease::operator=(Lease&& other) noexcept {
  std::swap(budget_, other.budget_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

StagingBudget::Lease::~Lease() {
  if (budget_ != nullptr) budget_->Release(bytes_);
}

std::shared_ptr<StagingBudget> StagingBudget::Create(std::uint64_t bytes) {
  return std::shared_ptr<StagingBudget>(new StagingBudget(bytes));
}

StagingBudget::Lease StagingBudget::Take(std::uint64_t bytes) {
  used_bytes_ += bytes;
  used_bytes_max_ = std::max(used_bytes_max_, used_bytes_);
  return {shared_from_this(), bytes};
}

Result<StagingBudget::Lease> StagingBudget::Acquire(std::uint64_t bytes, TimePoint deadline) {
  const MutexLock lock(mutex_);
  if (bytes > limit_bytes_) {
    return Status(
        Code::kResourceExhausted,
        fmt::format("{} bytes of staging asked for, the whole budget has {}", bytes, limit_bytes_),
        Reason::kOutOfMemory);
  }
  const std::uint64_t ticket = next_ticket_++;
  waiting_.push_back(ticket);
  bool in_time = true;
  const auto my_turn = [&]() TB_REQUIRES(mutex_) {
    return waiting_.front() == ticket && bytes <= limit_bytes_ - used_bytes_;
  };
  while (in_time && !my_turn()) in_time = released_.WaitUntil(mutex_, deadline);
  const bool served = my_turn();
  std::erase(waiting_, ticket);
  released_.NotifyAll();
  if (!served) {
    return Status(Code::kDeadlineExceeded,
                  fmt::format("{} of {} bytes of staging stayed in use", used_bytes_, limit_bytes_),
                  Reason::kOutOfMemory);
  }
  return Take(bytes);
}

Result<StagingBudget::Lease> StagingBudget::TryAcquire(std::uint64_t bytes) {
  const MutexLock lock(mutex_);
  if (!waiting_.empty() || bytes > limit_bytes_ - used_bytes_) {
    return Status(Code::kResourceExhausted,
                  fmt::format("{} bytes of staging asked for, {} of {} are free", bytes,
                              limit_bytes_ - used_bytes_, limit_bytes_),
                  Reason::kOutOfMemory);
  }
  return Take(bytes);
}

void StagingBudget::Release(std::uint64_t bytes) {
  const MutexLock lock(mutex_);
  TB_CHECK(bytes <= used_bytes_);
  used_bytes_ -= bytes;
  released_.NotifyAll();
}

std::uint64_t StagingBudget::used_bytes() const {
  const MutexLock lock(mutex_);
  return used_bytes_;
}

std::uint64_t StagingBudget::used_bytes_max() const {
  const MutexLock lock(mutex_);
  return used_bytes_max_;
}

}  // namespace tensorbus::transport
