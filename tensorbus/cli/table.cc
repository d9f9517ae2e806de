#include "tensorbus/cli/table.h"

#include <algorithm>
#include <cstdlib>
#include <fmt/format.h>
#include <iostream>
#include <unistd.h>

#include "tensorbus/base/printable.h"

namespace tensorbus::cli {

namespace {

/// Characters of printable text: UTF-8 continuation bytes take no room.
std::size_t Width(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

}  // namespace

bool Colourful(const std::ostream& err) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets the environment
  return &err == &std::cerr && ::isatty(STDERR_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
}

std::string Paint(std::string_view text, Colour colour, bool colourful) {
  if (!colourful || colour == Colour::kPlain) return Printable(text);
  const int code = colour == Colour::kBold     ? 1
                   : colour == Colour::kGreen  ? 32
                   : colour == Colour::kYellow ? 33
                                               : 31;
  return fmt::format("\x1b[{}m{}\x1b[0m", code, Printable(text));
}

void Table::Add(std::vector<Cell> row) {
  for (Cell& cell : row) cell.text = Printable(cell.text);
  rows_.push_back(std::move(row));
}

void Table::Print(std::ostream& err, std::string_view indent) const {
  const bool colours = Colourful(err);
  std::vector<std::vector<Cell>> rows;
  rows.emplace_back(header_.begin(), header_.end());
  rows.insert(rows.end(), rows_.begin(), rows_.end());
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], Width(row[i].text));
    }
  }
  for (const auto& row : rows) {
    std::string line(indent);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - Width(row[i].text), ' ');
      const std::string text = Paint(row[i].text, row[i].colour, colours);
      const bool right = std::find(right_.begin(), right_.end(), i) != right_.end();
      line += (i == 0 ? "" : "  ") + (right ? pad + text : text + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    err << line << '\n';
  }
}

std::string Count(std::uint64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string HumanBytes(std::uint64_t bytes) {
  constexpr std::uint64_t kKilo = 1000;
  if (bytes < kKilo) return fmt::format("{} B", bytes);
  const char* unit = "kB";
  double value = static_cast<double>(bytes) / kKilo;
  for (const char* next : {"MB", "GB", "TB", "PB"}) {
    if (value < kKilo) break;
    value /= kKilo;
    unit = next;
  }
  return fmt::format("{:.3f} {}", value, unit);
}

std::string HumanSeconds(double seconds) {
  if (seconds < 100) return fmt::format("{:.1f} s", seconds);
  if (seconds < 6000) return fmt::format("{:.0f} min", seconds / 60);
  return fmt::format("{:.1f} h", seconds / 3600);
}

}  // namespace tensorbus::cli
