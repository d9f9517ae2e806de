#include "tensorbus/base/service_flags.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <iostream>
#include <memory>
#include <sstream>
#include <string_view>
#include <sys/stat.h>

#include "tensorbus/base/environment.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/base/standard_output.h"

namespace tensorbus {
namespace {

constexpr int kBadUsage = 2;
constexpr const char* kConfig = "--config";
constexpr const char* kPrintConfig = "--print-config";
constexpr std::size_t kConfigBytesMax = 1 << 20;

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

/// Before it is opened: a pipe or a device may have no end.
std::string CheckConfigFile(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    return fmt::format("{}: {}", path, std::strerror(errno));  // NOLINT(concurrency-mt-unsafe)
  }
  if (!S_ISREG(info.st_mode)) return path + " is not a regular file";
  return "";
}

/// Takes only what CLI11 reads as it says, and not more than settings need. The file is read once:
/// what was looked at is what counts.
class ConfigReader : public CLI::ConfigBase {
 public:
  explicit ConfigReader(const CLI::App& app) : app_(app) {}

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::string text(kConfigBytesMax + 1, '\0');
    input.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (!input.eof() && input.fail()) throw Fault(" cannot be read");
    text.resize(static_cast<std::size_t>(input.gcount()));
    if (text.size() > kConfigBytesMax) {
      throw Fault(fmt::format(" is too large; settings have at most {} bytes", kConfigBytesMax));
    }
    std::istringstream settings(text);
    std::string line;
    for (int number = 1; std::getline(settings, line); ++number) {
      const std::string fault = CheckConfigLine(line);
      if (!fault.empty()) throw Fault(fmt::format(": line {} {}", number, fault));
    }
    settings.clear();
    settings.seekg(0);
    return ConfigBase::from_config(settings);
  }

 private:
  CLI::FileError Fault(const std::string& what) const {
    return CLI::FileError(fmt::format("{}: {}{}", kConfig, app_[kConfig]->as<std::string>(), what));
  }

  const CLI::App& app_;
};

/// What the program was given, as --print-config may show it. It is not what was given any more.
void MakePrintable(CLI::App& app) {
  for (CLI::Option* const option : app.get_options()) {
    option->default_str(Printable(option->get_default_str()));
    const std::vector<std::string> given = option->results();
    if (std::all_of(given.begin(), given.end(), IsPrintable)) continue;
    option->clear();
    for (const std::string& text : given) option->add_result(Printable(text));
  }
}

std::vector<EnvironmentFlag> EnvironmentFlags(const CLI::App& app) {
  std::vector<EnvironmentFlag> flags;
  for (const CLI::Option* option : app.get_options()) {
    const std::string variable = option->get_envname();
    if (!variable.empty()) flags.push_back({"--" + option->get_single_name(), variable});
  }
  return flags;
}

int Refuse(const CLI::App& app, std::string_view why) {
  app.exit(CLI::ParseError(Printable(why), kBadUsage));
  return kBadUsage;
}

}  // namespace

void AddConfigFlags(CLI::App& app) {
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.config_formatter(std::make_shared<ConfigReader>(app));
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
    return FlushOutput(app.exit(help));
  } catch (const CLI::ConfigError& error) {
    return Refuse(app, fmt::format("{} has a setting that is no flag of {}: {}",
                                   app[kConfig]->as<std::string>(), app.get_name(), error.what()));
  } catch (const CLI::ParseError& error) {
    return Refuse(app, error.what());
  }
  if (app.count(kPrintConfig) == 0) return std::nullopt;
  MakePrintable(app);
  std::cout << app.config_to_str(true, false);
  return FlushOutput(EXIT_SUCCESS);
}

}  // namespace tensorbus
