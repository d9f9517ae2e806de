#include <CLI/CLI.hpp>

#include "tensorbus/cli/commands.h"

int main(int argc, char** argv) {
  using namespace tensorbus::cli;  // NOLINT(google-build-using-namespace): main only
  CLI::App app("Moves model weights from trainers to rollout engines.", "tensorbusctl");
  app.require_subcommand(1);
  int exit_code = kExitFine;
  for (RegisterCommand* command : AllCommands()) command(app, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitFine : kExitUsage;
  }
  return exit_code;
}
