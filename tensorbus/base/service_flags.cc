#include "tensorbus/base/service_flags.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <iostream>
#include <sys/stat.h>

#include "tensorbus/base/environment.h"

namespace tensorbus {
namespace {

constexpr int kFailed = 1;
constexpr int kBadUsage = 2;
constexpr const char* kConfig = "--config";
constexpr const char* kPrintConfig = "--print-config";
constexpr std::int64_t kConfigBytesMax = 1 << 20;

/// A pipe or a device may have no end.
std::string CheckConfigFile(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    return fmt::format("{}: {}", path, std::strerror(errno));  // NOLINT(concurrency-mt-unsafe)
  }
  if (!S_ISREG(info.st_mode)) return path + " is not a regular file";
  if (info.st_size <= kConfigBytesMax) return "";
  return fmt::format("{} has {} bytes; settings have at most {}", path, info.st_size,
                     kConfigBytesMax);
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
