#pragma once

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

}  // namespace tensorbus
