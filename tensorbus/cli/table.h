#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tensorbus::cli {

enum class Colour { kPlain, kBold, kGreen, kYellow, kRed };

/// Whether people watch: `err` is the process's standard error, it is a terminal, and NO_COLOR is
/// not set.
bool Colourful(const std::ostream& err);
/// The text, made printable (base/printable.h), in that colour if there are colours.
std::string Paint(std::string_view text, Colour colour, bool colourful);

/// Text of a table, in its colour where people watch.
struct Cell {
  // Implicit on purpose: a row is a list of texts.
  Cell(std::string t, Colour c = Colour::kPlain)  // NOLINT(google-explicit-constructor)
      : text(std::move(t)), colour(c) {}
  Cell(const char* t) : text(t) {}  // NOLINT(google-explicit-constructor)

  std::string text;
  Colour colour = Colour::kPlain;
};

/// Rows under a header, columns aligned, two blanks between them. Widths count characters as a
/// terminal shows them (UTF-8; no wide ones). What is in the cells may come from anywhere: it is
/// made printable.
class Table {
 public:
  /// Columns in `right`, those with numbers, end at one line instead of beginning there.
  explicit Table(std::vector<std::string> header, std::vector<std::size_t> right = {})
      : header_(std::move(header)), right_(std::move(right)) {}

  void Add(std::vector<Cell> row);
  bool empty() const { return rows_.empty(); }
  void Print(std::ostream& err, std::string_view indent = "") const;

 private:
  std::vector<std::string> header_;
  std::vector<std::size_t> right_;
  std::vector<std::vector<Cell>> rows_;
};

/// "1 agent", "3 agents".
std::string Count(std::uint64_t count, std::string_view what);
/// "1.234 GB": decimal units, as bandwidth is told in.
std::string HumanBytes(std::uint64_t bytes);
/// "3.2 s", "12 min", "5 h": for ages.
std::string HumanSeconds(double seconds);

}  // namespace tensorbus::cli
