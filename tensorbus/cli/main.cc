#include <iostream>
#include <string>
#include <vector>

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
  } catch (const CLI::RequiredError& error) {
    // A mistyped command is what is wrong then, not that one is missing.
    const std::vector<std::string> unknown = app.remaining(true);
    if (unknown.empty()) {
      app.exit(error);
    } else {
      app.exit(CLI::ExtrasError(app.get_name(), unknown));
    }
    return kExitUsage;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitFine : kExitUsage;
  }
  if (!std::cout.flush()) {
    std::cerr << "error: standard output cannot be written\n";
    return exit_code == kExitFine ? kExitFailed : exit_code;
  }
  return exit_code;
}
