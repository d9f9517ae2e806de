#pragma once

#include <functional>
#include <utility>

#include "tensorbus/daemon/side_work.h"

namespace tensorbus::testing {

/// Side work done on the executor itself, in its turn: the same input, the same course of things.
class InlineSideWork final : public daemon::SideWork {
 public:
  explicit InlineSideWork(Executor& executor) : SideWork(executor), executor_(executor) {}

 protected:
  void Run(Lane, std::function<void()> task) override { executor_.Post(std::move(task)); }

 private:
  Executor& executor_;
};

}  // namespace tensorbus::testing
