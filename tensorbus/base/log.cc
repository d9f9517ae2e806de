#include "tensorbus/base/log.h"

#include <memory>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "tensorbus/base/printable.h"

namespace tensorbus {
namespace {

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

spdlog::logger& Logger() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("tensorbus",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e %L %v");
    return made;
  }();
  return *logger;
}

}  // namespace

void InitLog(std::string_view component, LogLevel level) {
  Logger().set_pattern(fmt::format("%Y-%m-%dT%H:%M:%S.%e %L {} %v", component));
  Logger().set_level(ToSpdlog(level));
}

Result<LogLevel> ParseLogLevel(std::string_view text) {
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warn") return LogLevel::kWarn;
  if (text == "error") return LogLevel::kError;
  return Status(Code::kInvalidArgument,
                fmt::format("log level '{}' is none of debug, info, warn, error", text));
}

namespace internal {

bool LogEnabled(LogLevel level) {
  return Logger().should_log(ToSpdlog(level));
}

void WriteLog(LogLevel level, std::string_view line) {
  Logger().log(ToSpdlog(level), "{}", line);
}

std::string LogValue(std::string_view value) {
  const bool plain = value.find_first_of(" \"=") == std::string_view::npos && IsPrintable(value);
  if (!value.empty() && plain) return std::string(value);
  std::string quoted;
  for (const char c : value) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return '"' + Printable(quoted) + '"';
}

}  // namespace internal

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  if (!internal::LogEnabled(level)) return;
  std::string line = fmt::format("event={}", event);
  for (const LogField& field : fields) {
    line += ' ';
    line += field.key;
    line += '=';
    line += field.value;
  }
  internal::WriteLog(level, line);
}

}  // namespace tensorbus
