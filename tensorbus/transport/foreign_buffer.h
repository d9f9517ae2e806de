#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensorbus/transport/staging_budget.h"

namespace tensorbus::transport {

/// Most bytes of foreign memory that one connection holds on their way.
inline constexpr std::uint64_t kForeignBufferBytes = std::uint64_t{1} << 20;

/// Bytes between a socket and foreign memory, counted in a budget for as long as they are held.
/// Move-only, empty at first.
class ForeignBuffer {
 public:
  ForeignBuffer() = default;
  explicit ForeignBuffer(StagingBudget::Lease lease)
      : lease_(std::move(lease)), bytes_(lease_.bytes()) {}

  bool empty() const { return bytes_.empty(); }
  std::span<std::byte> bytes() { return bytes_; }

 private:
  StagingBudget::Lease lease_;
  std::vector<std::byte> bytes_;
};

}  // namespace tensorbus::transport
