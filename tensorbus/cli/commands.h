#pragma once

#include <span>
#include <string>

#include "tensorbus/base/status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tensorbus::cli {

/// Exit codes of every command.
inline constexpr int kExitFine = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

/// How a command ends that plans from layouts and files: kExitUsage when these are at fault,
/// kExitFailed when they are fine but cannot be planned, or something broke.
int ExitCodeFor(const Status& status);

/// Adds one command with its flags to `app`. When it is chosen, it runs during parsing and leaves
/// its exit code in `*exit_code`, which outlives `app`. Flags are parsed in this function's file
/// only; the work is done in code that knows no CLI11.
using RegisterCommand = void(CLI::App& app, int* exit_code);

RegisterCommand RegisterPlan;
RegisterCommand RegisterSimulate;
RegisterCommand RegisterUp;
RegisterCommand RegisterDown;
RegisterCommand RegisterStatus;
RegisterCommand RegisterVersions;
RegisterCommand RegisterRollback;
RegisterCommand RegisterExplain;
RegisterCommand RegisterWhoIsMissing;
RegisterCommand RegisterVerify;
RegisterCommand RegisterTrace;
RegisterCommand RegisterBench;
RegisterCommand RegisterBenchWorker;  // hidden: what bench starts
RegisterCommand RegisterDoctor;
RegisterCommand RegisterCompletion;

/// Adds a flag for a time in seconds, `least` to `most`; not a number is neither.
CLI::Option* AddSeconds(CLI::App& command, const std::string& flag, double* seconds, double least,
                        double most, const std::string& help);

struct TransferOptions;
/// Adds the flags that name a transfer, which several commands share.
void AddTransferOptions(CLI::App& command, TransferOptions* options);

/// Every command, in the order in which help lists them. A new one is declared above and added
/// here.
std::span<RegisterCommand* const> AllCommands();

}  // namespace tensorbus::cli
