#include "tensorbus/base/service_flags.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <fstream>
#include <iostream>
#include <string_view>
#include <sys/stat.h>

#include "tensorbus/base/environment.h"

namespace tensorbus {
namespace {

constexpr int kFailed = 1;
constexpr int kBadUsage = 2;
constexpr const char* kConfig = "--config";
constexpr const char* kPrintConfig = "--print-config";
constexpr std::int64_t kConfigBytesMax = 1 << 20;

/// What CLI11 would read as something else than it says.
std::string CheckConfigLine(std::string_view line) {
  const std::size_t first = line.find_first_not_of(" \t");
  if (first == line.npos || line[first] == ';') return "";
  char quote = 0;
  for (const char c : line) {
    if (quote == 0 && c == '#') break;  // a comment
    if (quote == 0 && (c == '"' || c == '\'')) {
      quote = c;
    } else if (c == quote) {
      quote = 0;
    } else if (c == '#') {
      return "has a # between quotes, which is taken for a comment; give this setting as a flag";
    }
  }
  return quote == 0 ? "" : "has a quote that is not closed";
}

/// A pipe or a device may have no end.
std::string CheckConfigFile(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    return fmt::format("{}: {}", path, std::strerror(errno));  // NOLINT(concurrency-mt-unsafe)
  }
  if (!S_ISREG(info.st_mode)) return path + " is not a regular file";
  if (info.st_size > kConfigBytesMax) {
    return fmt::format("{} has {} bytes; settings have at most {}", path, info.st_size,
                       kConfigBytesMax);
  }
  std::ifstream file(path);
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string fault = CheckConfigLine(line);
    if (!fault.empty()) return fmt::format("{}: line {} {}", path, number, fault);
  }
  return file.eof() ? "" : path + " cannot be read";
}

std::vector<EnvironmentFlag> EnvironmentFlags(const CLI::App& app) {
  std::vector<EnvironmentFlag> flags;
  for (const CLI::Option* option : app.get_options()) {
    const std::string variable = option->get_envname();
    if (!variable.empty()) flags.push_back({"--" + option->get_single_name(), variable});
  }
  return flags;
}

/// `code`, or 1 if what was printed could not be written.
int AfterOutput(int code) {
  if (std::cout.flush()) return code;
  std::cerr << "error: standard output cannot be written\n";
  return kFailed;
}

}  // namespace

void AddConfigFlags(CLI::App& app) {
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.set_config(kConfig, "", "File with settings, one `flag=value` per line (TOML or INI)")
      ->check(CheckConfigFile, "");
  app.add_flag(kPrintConfig)
      ->description("Show what flags, environment and --config come to, and exit")
      ->configurable(false);
}

std::optional<int> ParseServiceFlags(CLI::App& app, int argc, const char* const* argv) {
  try {
    std::vector<std::string> arguments = WithEnvironment(argc, argv, EnvironmentFlags(app));
    if (const auto fault = FlagWithoutValue(arguments)) throw CLI::ArgumentMismatch(*fault);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    app.parse(std::move(arguments));
  } catch (const CLI::Success& help) {
    return AfterOutput(app.exit(help));
  } catch (const CLI::ConfigError& error) {
    const auto file = app[kConfig]->as<std::string>();
    app.exit(CLI::ConfigError(fmt::format("{} has a setting that is no flag of {}: {}", file,
                                          app.get_name(), error.what())));
    return kBadUsage;
  } catch (const CLI::ParseError& error) {
    app.exit(error);
    return kBadUsage;
  }
  if (app.count(kPrintConfig) == 0) return std::nullopt;
  std::cout << app.config_to_str(true, false);
  return AfterOutput(EXIT_SUCCESS);
}

}  // namespace tensorbus
