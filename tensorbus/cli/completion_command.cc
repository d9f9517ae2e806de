#include <fmt/format.h>
#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/commands.h"

namespace tensorbus::cli {

namespace {

/// Commands without a group are for ourselves.
bool Shown(const CLI::App* command) {
  return !command->get_group().empty();
}

/// The long flags of one command and of those below it, blank-separated.
std::string FlagsOf(const CLI::App& command) {
  std::string out;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) out += fmt::format("--{} ", name);
  }
  for (const CLI::App* below : command.get_subcommands(Shown)) out += FlagsOf(*below) + " ";
  if (!out.empty()) out.pop_back();
  return out;
}

std::string CommandsOf(const CLI::App& app) {
  std::string out;
  for (const CLI::App* command : app.get_subcommands(Shown)) {
    out += (out.empty() ? "" : " ") + command->get_name();
  }
  return out;
}

/// A function that both shells understand, from what the commands' own flags say.
std::string Script(const CLI::App& app, bool zsh) {
  std::string cases;
  for (const CLI::App* command : app.get_subcommands(Shown)) {
    cases += fmt::format("    {}) words=\"{}\" ;;\n", command->get_name(), FlagsOf(*command));
  }
  const std::string prelude = zsh ? "autoload -U +X bashcompinit && bashcompinit\n" : std::string();
  return fmt::format(
      "{}_tensorbusctl() {{\n"
      "  local current=\"${{COMP_WORDS[COMP_CWORD]}}\" words=\"\"\n"
      "  if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
      "    COMPREPLY=($(compgen -W \"{}\" -- \"$current\"))\n"
      "    return\n"
      "  fi\n"
      "  case \"${{COMP_WORDS[1]}}\" in\n"
      "{}"
      "  esac\n"
      "  case \"$current\" in\n"
      "    -*) COMPREPLY=($(compgen -W \"$words\" -- \"$current\")) ;;\n"
      "    *) COMPREPLY=($(compgen -f -- \"$current\")) ;;\n"
      "  esac\n"
      "}}\n"
      "complete -o filenames -F _tensorbusctl tensorbusctl\n",
      prelude, CommandsOf(app), cases);
}

}  // namespace

void RegisterCompletion(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand("completion", "Print the completion script of a shell");
  const auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash or zsh")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh"}));
  command->footer("For this shell: source <(tensorbusctl completion bash)");
  command->callback([&app, shell, exit_code] {
    std::cout << Script(app, *shell == "zsh");
    *exit_code = kExitFine;
  });
}

}  // namespace tensorbus::cli
