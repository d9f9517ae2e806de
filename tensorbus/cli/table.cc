#include "tensorbus/cli/table.h"

#include <algorithm>
#include <cstdlib>
#include <fmt/format.h>
#include <iostream>
#include <unistd.h>

namespace tensorbus::cli {

namespace {

/// Characters a terminal shows: UTF-8 continuation bytes and colour sequences take no room.
std::size_t Width(std::string_view text) {
  std::size_t width = 0;
  bool escape = false;
  for (const char c : text) {
    if (escape) {
      escape = c != 'm';
    } else if (c == '\x1b') {
      escape = true;
    } else if ((static_cast<unsigned char>(c) & 0xC0) != 0x80) {
      ++width;
    }
  }
  return width;
}

}  // namespace

bool Colourful(const std::ostream& err) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets the environment
  return &err == &std::cerr && ::isatty(STDERR_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
}

std::string Paint(std::string_view text, Colour colour, bool colourful) {
  if (!colourful || colour == Colour::kPlain) return std::string(text);
  const int code = colour == Colour::kBold     ? 1
                   : colour == Colour::kGreen  ? 32
                   : colour == Colour::kYellow ? 33
                                               : 31;
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

void Table::Print(std::ostream& err, std::string_view indent) const {
  std::vector<std::size_t> widths;
  const auto measure = [&](const std::vector<std::string>& row) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  };
  measure(header_);
  for (const auto& row : rows_) measure(row);
  const auto print = [&](const std::vector<std::string>& row) {
    std::string line(indent);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - Width(row[i]), ' ');
      const bool right = std::find(right_.begin(), right_.end(), i) != right_.end();
      line += (i == 0 ? "" : "  ") + (right ? pad + row[i] : row[i] + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    err << line << '\n';
  };
  print(header_);
  for (const auto& row : rows_) print(row);
}

std::string Count(std::uint64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string HumanSeconds(double seconds) {
  if (seconds < 100) return fmt::format("{:.1f} s", seconds);
  if (seconds < 6000) return fmt::format("{:.0f} min", seconds / 60);
  return fmt::format("{:.1f} h", seconds / 3600);
}

}  // namespace tensorbus::cli
