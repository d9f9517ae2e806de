#include "tensorbus/cli/option_checks.h"

#include <charconv>
#include <cstdint>
#include <fmt/format.h>
#include <limits>
#include <string>

namespace tensorbus::cli {
namespace {

/// The greatest number has no successor.
constexpr std::uint64_t kVersionMax = std::numeric_limits<std::uint64_t>::max() - 1;

}  // namespace

CLI::Validator IsVersion(unsigned least) {
  const auto check = [least](const std::string& text) -> std::string {
    std::uint64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    const bool read = error == std::errc() && stop == end;
    if (read && value >= least && value <= kVersionMax) return "";
    return fmt::format("'{}' is not a version, a number from {} to {}", text, least, kVersionMax);
  };
  return {check, "VERSION"};
}

}  // namespace tensorbus::cli
