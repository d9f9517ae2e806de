#include <algorithm>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tensorbus/base/environment.h"
#include "tensorbus/base/malformed.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/base/standard_output.h"
#include "tensorbus/cli/admin_json.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/ordered_json.h"
#include "tensorbus/cli/unknown_word.h"

namespace tensorbus::cli {
namespace {

/// Says what is wrong with the command line; to programs too, if they asked for JSON.
int BadUsage(const CLI::App& app, const CLI::ParseError& error,
             const std::vector<std::string>& words) {
  // A mistyped command or flag is what is wrong then, not that one is missing.
  const bool of_words = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr ||
                        dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  const std::optional<std::string> unknown =
      of_words ? ExplainUnknownWord(app) : std::optional<std::string>();
  if (unknown) {
    std::cerr << Printable(*unknown) << "\n";
  } else {
    app.exit(CLI::ParseError(Printable(error.what()), kExitUsage));
  }
  if (std::find(words.begin(), words.end(), "--json") != words.end()) {
    std::cout << Dump(ErrorJson(Malformed(unknown.value_or(error.what())))) << "\n";
  }
  return kExitUsage;
}

}  // namespace
}  // namespace tensorbus::cli

int main(int argc, char** argv) {
  using namespace tensorbus::cli;  // NOLINT(google-build-using-namespace): main only
  CLI::App app("Moves model weights from trainers to rollout engines.", "tensorbusctl");
  app.set_version_flag("--version", "tensorbusctl " TENSORBUS_VERSION);
  app.require_subcommand(1);
  int exit_code = kExitFine;
  const std::vector<std::string> words(argv + 1, argv + std::max(argc, 1));
  for (RegisterCommand* command : AllCommands()) command(app, &exit_code);
  try {
    if (const auto fault = tensorbus::FlagWithoutValue(words)) throw CLI::ArgumentMismatch(*fault);
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    exit_code = app.exit(help);
  } catch (const CLI::ParseError& error) {
    return BadUsage(app, error, words);
  }
  return tensorbus::FlushOutput(exit_code);
}
