#pragma once

#include <fmt/format.h>
#include <string>
#include <string_view>

#include "tensorbus/base/status.h"

namespace tensorbus {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

/// Sets what is written (default kInfo) and the component every line begins with ("agent",
/// "daemon", …). Lines go to standard error as `time level component event=… key=value …`.
/// Thread-safe.
void InitLog(std::string_view component, LogLevel level);
/// "debug", "info", "warn", "error".
Result<LogLevel> ParseLogLevel(std::string_view text);

namespace internal {
bool LogEnabled(LogLevel level);
void WriteLog(LogLevel level, std::string_view line);
/// As it stands in a log line: quoted if it has a blank, quote, `=` or anything that is not
/// printable (printable.h).
std::string LogValue(std::string_view value);
}  // namespace internal

/// One `key=value` pair of a log line.
struct LogField {
  std::string_view key;
  std::string value;

  template <typename T>
  LogField(std::string_view k, const T& v)
      : key(k), value(internal::LogValue(fmt::format("{}", v))) {}
  LogField(std::string_view k, const Status& v) : key(k), value(internal::LogValue(v.ToString())) {}
};

/// Writes one event: Log(LogLevel::kInfo, "flip_done", {{"session", id}, {"version", 7}}).
void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {});

}  // namespace tensorbus
