#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tensorbus {

/// A flag of a program and the variable that stands in for it when it is not given.
struct EnvironmentFlag {
  std::string flag;      ///< "--log-level"
  std::string variable;  ///< "TENSORBUS_LOG_LEVEL"
};

/// The program's arguments (without its name), then what the environment says for flags that these
/// do not name. Given to a parser as the command line, flags beat the environment and both beat a
/// configuration file. An empty variable counts as none. Not while another thread changes the
/// environment.
std::vector<std::string> WithEnvironment(int argc, const char* const* argv,
                                         const std::vector<EnvironmentFlag>& flags);

/// What is wrong with a word `--flag=`, as a script with an empty variable makes it, if there is
/// one before a `--`: a parser would take the next word for its value.
std::optional<std::string> FlagWithoutValue(std::span<const std::string> arguments);

}  // namespace tensorbus
