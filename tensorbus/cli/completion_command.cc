#include <algorithm>
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

/// Blank-separated words that a flag or position may have, as its help shows them: `a|b` or
/// `{a,b}`. "" when it may have any.
std::string ChoicesOf(const CLI::Option& option) {
  std::string type = option.get_type_name();
  const auto open = type.find('{');
  const auto close = type.find('}');
  if (open != std::string::npos && close != std::string::npos && open < close) {
    type = type.substr(open + 1, close - open - 1);
  } else if (type.find('|') == std::string::npos) {
    return "";
  }
  const auto rest = type.find("...");
  if (rest != std::string::npos) type.erase(rest);
  std::replace_if(
      type.begin(), type.end(), [](char c) { return c == '|' || c == ','; }, ' ');
  return type;
}

/// What may follow each command: the shell's cases, by the path of commands typed so far.
struct Cases {
  std::string commands;  ///< path)          -> that it is a command
  std::string names;     ///< path)          -> commands and words
  std::string flags;     ///< path)          -> flags
  std::string values;    ///< "path --flag") -> words of the flag

  void Add(const CLI::App& command, const std::string& path) {
    std::string below;
    std::string long_flags;
    for (const CLI::App* next : command.get_subcommands(Shown)) below += " " + next->get_name();
    for (const CLI::Option* option : command.get_options()) {
      const std::string choices = ChoicesOf(*option);
      if (option->get_positional()) below += " " + choices;
      for (const std::string& name : option->get_lnames()) {
        long_flags += " --" + name;
        if (choices.empty()) continue;
        values += fmt::format("    \"{} --{}\") words=\"{}\" ;;\n", path, name, choices);
      }
    }
    names += fmt::format("        \"{}\") words=\"{}\" ;;\n", path, below);
    flags += fmt::format("        \"{}\") words=\"{}\" ;;\n", path, long_flags);
    for (const CLI::App* next : command.get_subcommands(Shown)) {
      const std::string further = path + " " + next->get_name();
      commands += fmt::format("{}\"{}\"", commands.empty() ? "" : "|", further);
      Add(*next, further);
    }
  }
};

/// A function that both shells understand, from what the commands' own flags say. Where it has
/// nothing to offer, the shell offers files.
std::string Script(const CLI::App& app, bool zsh) {
  Cases cases;
  cases.Add(app, "");
  constexpr const char* kFunction = R"(_tensorbusctl() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" flag="${{COMP_WORDS[COMP_CWORD-1]}}"
  local path="" words="" i
  # --flag=value is three words to bash.
  if [ "$current" = "=" ]; then
    current=""
  elif [ "$flag" = "=" ]; then
    flag="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$path ${{COMP_WORDS[i]}}" in
      {}) path="$path ${{COMP_WORDS[i]}}" ;;
    esac
  done
  case "$path $flag" in
{}  esac
  if [ -z "$words" ]; then
    case "$current" in
      -*) case "$path" in
{}      esac ;;
      *) case "$path" in
{}      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _tensorbusctl tensorbusctl
)";
  return (zsh ? "autoload -U +X bashcompinit && bashcompinit\n" : "") +
         fmt::format(kFunction, cases.commands, cases.values, cases.flags, cases.names);
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
