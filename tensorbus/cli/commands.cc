#include "tensorbus/cli/commands.h"

#include <array>

namespace tensorbus::cli {

std::span<RegisterCommand* const> AllCommands() {
  static constexpr std::array<RegisterCommand*, 15> kCommands = {
      &RegisterUp,          &RegisterDown,    &RegisterStatus,       &RegisterVersions,
      &RegisterRollback,    &RegisterExplain, &RegisterWhoIsMissing, &RegisterVerify,
      &RegisterTrace,       &RegisterPlan,    &RegisterSimulate,     &RegisterBench,
      &RegisterBenchWorker, &RegisterDoctor,  &RegisterCompletion};
  return kCommands;
}

}  // namespace tensorbus::cli
