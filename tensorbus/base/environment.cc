#include "tensorbus/base/environment.h"

#include <algorithm>
#include <cstdlib>

namespace tensorbus {

std::vector<std::string> WithEnvironment(int argc, const char* const* argv,
                                         const std::vector<EnvironmentFlag>& flags) {
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  const std::vector<std::string> given = arguments;
  for (const EnvironmentFlag& each : flags) {
    const char* const value = std::getenv(each.variable.c_str());  // NOLINT(concurrency-mt-unsafe)
    if (value == nullptr || *value == 0) continue;
    const bool named = std::any_of(given.begin(), given.end(), [&](const std::string& argument) {
      return argument == each.flag || argument.rfind(each.flag + "=", 0) == 0;
    });
    if (!named) arguments.push_back(each.flag + "=" + value);
  }
  return arguments;
}

std::optional<std::string> FlagWithoutValue(std::span<const std::string> arguments) {
  for (const std::string& argument : arguments) {
    if (argument == "--") break;
    if (argument.rfind("--", 0) != 0 || argument.find('=') != argument.size() - 1) continue;
    return argument + " has nothing after the '='; give it a value or leave it out";
  }
  return std::nullopt;
}

}  // namespace tensorbus
