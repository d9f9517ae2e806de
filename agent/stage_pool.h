#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/transport/foreign_memory.h"
#include "tensorbus/transport/staging_budget.h"

namespace tensorbus::agent {

/// A bounded set of stages in this process's own memory, made when first needed and then kept, so
/// that a refresh finds their pages present. All are counted in the staging budget.
///
/// Threads: thread-safe; shared by the memories that lend from it.
class StagePool : public std::enable_shared_from_this<StagePool> {
 public:
  static constexpr std::uint64_t kStageBytes = std::uint64_t{1} << 20;
  static constexpr std::uint64_t kStageBytesMin = std::uint64_t{64} << 10;

  /// At most `count_max` stages, and at most a quarter of the budget, which makes them smaller
  /// when it is small.
  static std::shared_ptr<StagePool> Create(std::shared_ptr<transport::StagingBudget> budget,
                                           std::uint32_t count_max);

  std::uint64_t stage_bytes() const { return stage_bytes_; }
  /// Waits until one is free. Errors: kDeadlineExceeded; StagingBudget's.
  Result<transport::ForeignStage> Borrow(TimePoint deadline);

 private:
  struct Stage {
    transport::StagingBudget::Lease lease;
    std::vector<std::byte> bytes;
  };

  StagePool(std::shared_ptr<transport::StagingBudget> budget, std::uint64_t stage_bytes,
            std::uint32_t count_max);
  Result<std::unique_ptr<Stage>> Make(TimePoint deadline);
  void Return(std::unique_ptr<Stage> stage);

  const std::shared_ptr<transport::StagingBudget> budget_;
  const std::uint64_t stage_bytes_;
  const std::uint32_t count_max_;
  Mutex mutex_;
  CondVar returned_;
  std::uint32_t count_ TB_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<Stage>> idle_ TB_GUARDED_BY(mutex_);
};

}  // namespace tensorbus::agent
