#include "agent/stage_pool.h"

#include <algorithm>

namespace tensorbus::agent {

std::shared_ptr<StagePool> StagePool::Create(std::shared_ptr<transport::StagingBudget> budget,
                                             std::uint32_t count_max) {
  const std::uint64_t share = budget->limit_bytes() / 4;
  const std::uint64_t bytes = std::clamp(share, kStageBytesMin, kStageBytes);
  const std::uint64_t fit = std::max<std::uint64_t>(1, share / bytes);
  const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(count_max, fit));
  return std::shared_ptr<StagePool>(new StagePool(std::move(budget), bytes, std::max(1U, count)));
}

StagePool::StagePool(std::shared_ptr<transport::StagingBudget> budget, std::uint64_t stage_bytes,
                     std::uint32_t count_max)
    : budget_(std::move(budget)), stage_bytes_(stage_bytes), count_max_(count_max) {}

Result<std::unique_ptr<StagePool::Stage>> StagePool::Make(TimePoint deadline) {
  TB_ASSIGN_OR_RETURN(transport::StagingBudget::Lease lease,
                      budget_->Acquire(stage_bytes_, deadline));
  auto stage = std::make_unique<Stage>();
  stage->lease = std::move(lease);
  stage->bytes.resize(static_cast<std::size_t>(stage_bytes_));
  return stage;
}

Result<transport::ForeignStage> StagePool::Borrow(TimePoint deadline) {
  std::unique_ptr<Stage> stage;
  {
    const MutexLock lock(mutex_);
    while (idle_.empty() && count_ == count_max_) {
      if (!returned_.WaitUntil(mutex_, deadline) && idle_.empty() && count_ == count_max_) {
        return Status(Code::kDeadlineExceeded, "all stages for private memory stayed in use",
                      Reason::kOutOfMemory);
      }
    }
    if (!idle_.empty()) {
      stage = std::move(idle_.back());
      idle_.pop_back();
    } else {
      ++count_;
    }
  }
  if (stage == nullptr) {
    Result<std::unique_ptr<Stage>> made = Make(deadline);
    if (!made.ok()) {
      const MutexLock lock(mutex_);
      --count_;
      returned_.NotifyOne();
      return made.status();
    }
    stage = *std::move(made);
  }
  Stage* const lent = stage.release();
  return transport::ForeignStage(
      lent->bytes, std::shared_ptr<void>(lent, [pool = shared_from_this()](void* back) {
        pool->Return(std::unique_ptr<Stage>(static_cast<Stage*>(back)));
      }));
}

void StagePool::Return(std::unique_ptr<Stage> stage) {
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(stage));
  returned_.NotifyOne();
}

}  // namespace tensorbus::agent
