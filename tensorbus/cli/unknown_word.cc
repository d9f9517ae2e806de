#include "tensorbus/cli/unknown_word.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <vector>

#include <CLI/CLI.hpp>

#include "planner/near_names.h"

namespace tensorbus::cli {
namespace {

/// The outermost of the commands typed that was given words it does not know; null when none was.
const CLI::App* Puzzled(const CLI::App& app) {
  if (!app.remaining(false).empty()) return &app;
  for (const CLI::App* command : app.get_subcommands()) {
    if (const CLI::App* found = Puzzled(*command); found != nullptr) return found;
  }
  return nullptr;
}

/// "tensorbusctl bench m2n"
std::string FullName(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return (parent == nullptr ? "" : FullName(*parent) + " ") + command.get_name();
}

/// The commands below `command`, but for those without a group, which are for ourselves.
std::vector<std::string> CommandsOf(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* below : command.get_subcommands(
           [](const CLI::App* candidate) { return !candidate->get_group().empty(); })) {
    names.push_back(below->get_name());
  }
  return names;
}

std::vector<std::string> OptionsOf(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::vector<std::string> NearOf(const std::string& word, const std::vector<std::string>& known) {
  planner::NearNames near(word);
  for (const std::string& name : known) near.Consider(name);
  return near.Take();
}

/// "; did you mean 'a' or 'b'?"
std::string Meant(const std::vector<std::string>& near) {
  return near.empty() ? ";" : fmt::format("; did you mean '{}'?", fmt::join(near, "' or '"));
}

bool IsFlag(const std::string& word) {
  return word.starts_with('-');
}

/// Which of the words a command was meant with: flags and their values may be quite right for that
/// one. The first that looks like a command, else the first that is no flag.
const std::string& MeantAsCommand(const std::vector<std::string>& words,
                                  const std::vector<std::string>& commands) {
  const auto plain = std::find_if_not(words.begin(), words.end(), IsFlag);
  const auto like = std::find_if(plain, words.end(), [&](const std::string& word) {
    return !IsFlag(word) && !NearOf(word, commands).empty();
  });
  return like != words.end() ? *like : plain != words.end() ? *plain : words.front();
}

}  // namespace

std::optional<std::string> ExplainUnknownWord(const CLI::App& app) {
  const CLI::App* const command = Puzzled(app);
  if (command == nullptr) return std::nullopt;
  const std::vector<std::string> words = command->remaining(false);
  const std::vector<std::string> commands = CommandsOf(*command);
  const bool expects_command = !commands.empty() && command->get_subcommands().empty();
  const std::string& word = expects_command ? MeantAsCommand(words, commands) : words.front();
  std::string what = fmt::format("takes no argument '{}';", word);
  if (IsFlag(word)) {
    const std::string flag = word.substr(0, word.find('='));
    what = fmt::format("has no option '{}'{}", flag, Meant(NearOf(flag, OptionsOf(*command))));
  } else if (expects_command) {
    what = fmt::format("has no command '{}'{}", word, Meant(NearOf(word, commands)));
  }
  const std::string name = FullName(*command);
  return fmt::format("{} {} `{} --help` lists what there is", name, what, name);
}

}  // namespace tensorbus::cli
