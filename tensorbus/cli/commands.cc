#include "tensorbus/cli/commands.h"

#include <array>

namespace tensorbus::cli {

std::span<RegisterCommand* const> AllCommands() {
  static constexpr std::array<RegisterCommand*, 12> kCommands = {
      &RegisterUp,       &RegisterDown,    &RegisterStatus,       &RegisterVersions,
      &RegisterRollback, &RegisterExplain, &RegisterWhoIsMissing, &RegisterVerify,
      &RegisterTrace,    &RegisterPlan,    &RegisterDoctor,       &RegisterCompletion};
  return kCommands;
}

}  // namespace tensorbus::cli
