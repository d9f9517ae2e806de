#include "tensorbus/cli/commands.h"

#include <array>

namespace tensorbus::cli {

std::span<RegisterCommand* const> AllCommands() {
  static constexpr std::array<RegisterCommand*, 1> kCommands = {&RegisterPlan};
  return kCommands;
}

}  // namespace tensorbus::cli
