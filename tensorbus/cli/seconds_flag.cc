#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "tensorbus/cli/commands.h"

namespace tensorbus::cli {

CLI::Option* AddSeconds(CLI::App& command, const std::string& flag, double* seconds, double least,
                        double most, const std::string& help) {
  // CLI::Range lets not-a-number through: it is neither less nor greater.
  const auto check = [least, most](const std::string& text) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) return "";
    return fmt::format("'{}' is not a number of seconds from {} to {}", text, least, most);
  };
  return command.add_option(flag, *seconds, help)
      ->type_name("SECONDS")
      ->check(check, fmt::format("{}..{}", least, most))
      ->capture_default_str();
}

}  // namespace tensorbus::cli
