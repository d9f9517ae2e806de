#include "tensorbus/cli/commands.h"

#include <array>

namespace tensorbus::cli {

std::span<RegisterCommand* const> AllCommands() {
  static constexpr std::array<RegisterCommand*, 14> kCommands = {
      &RegisterUp,       &RegisterDown,      &RegisterStatus,       &RegisterVersions,
      &RegisterRollback, &RegisterExplain,   &RegisterWhoIsMissing, &RegisterVerify,
      &RegisterTrace,    &RegisterPlan,      &RegisterBench,        &RegisterBenchWorker,
      &RegisterDoctor,   &RegisterCompletion};
  return kCommands;
}

}  // namespace tensorbus::cli
