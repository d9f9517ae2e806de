#include "tensorbus/cli/commands.h"

#include <array>

namespace tensorbus::cli {

int ExitCodeFor(const Status& status) {
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kNotFound:
    case Code::kAlreadyExists:
    case Code::kPermissionDenied:
    case Code::kOutOfRange:
    case Code::kUnimplemented:
      return kExitUsage;
    default:
      return kExitFailed;
  }
}

std::span<RegisterCommand* const> AllCommands() {
  static constexpr std::array<RegisterCommand*, 15> kCommands = {
      &RegisterUp,          &RegisterDown,    &RegisterStatus,       &RegisterVersions,
      &RegisterRollback,    &RegisterExplain, &RegisterWhoIsMissing, &RegisterVerify,
      &RegisterTrace,       &RegisterPlan,    &RegisterSimulate,     &RegisterBench,
      &RegisterBenchWorker, &RegisterDoctor,  &RegisterCompletion};
  return kCommands;
}

}  // namespace tensorbus::cli
