#include "planner/name_class.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fmt/format.h>

namespace tensorbus::planner {
namespace {

constexpr std::size_t kMaxExpressionBytes = 4096;
constexpr std::array<std::string_view, 3> kNumbered = {"layers", "experts", "blocks"};

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}

/// Length of a number component after "layers." and the like, 0 if none starts at `at`.
std::size_t NumberAt(std::string_view name, std::size_t at) {
  std::size_t end = at;
  while (end < name.size() && IsDigit(name[end])) ++end;
  return end < name.size() && name[end] == '.' ? end - at : 0;
}

/// Whether the name reads "WORD." just before `at`.
bool FollowsNumberedWord(std::string_view name, std::size_t at) {
  for (const std::string_view word : kNumbered) {
    if (at < word.size() + 1 || name[at - 1] != '.') continue;
    if (name.substr(at - 1 - word.size(), word.size()) == word) return true;
  }
  return false;
}

/// Whether the text before `at` ends in one of the words and an escaped dot: `layers\.`.
bool AfterNumberedWord(std::string_view expression, std::size_t at) {
  return std::any_of(kNumbered.begin(), kNumbered.end(), [&](std::string_view word) {
    return at >= word.size() + 2 && expression.substr(at - 2, 2) == "\\." &&
           expression.substr(at - 2 - word.size(), word.size()) == word;
  });
}

/// Whether an expression might tell one layer or expert number from another. It cannot when digits
/// stand in it only after letters ("w1", "fc2") or as a component after another word ("mlp\.2"),
/// and
/// `\d` only as `layers\.\d+\.`. A wrong "yes" costs time, a wrong "no" must not happen.
bool MayReadNumbers(std::string_view expression) {
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    const char before = i == 0 ? '\0' : expression[i - 1];
    if (c == '{') return true;
    if (c == '\\' && expression.substr(i, 2) == "\\d") {
      if (expression.substr(i, 5) != "\\d+\\." || !AfterNumberedWord(expression, i)) return true;
    } else if (IsDigit(c)) {
      const bool in_word = (before >= 'a' && before <= 'z') || before == '_' || IsDigit(before);
      const bool component = i >= 3 && expression.substr(i - 2, 2) == "\\." &&
                             expression[i - 3] >= 'a' && expression[i - 3] <= 'z' &&
                             !AfterNumberedWord(expression, i);
      if (!in_word && !component) return true;
    }
  }
  return false;
}

std::optional<std::uint64_t> NumberAfter(std::string_view name, std::string_view word) {
  for (std::size_t at = name.find(word); at != std::string_view::npos;
       at = name.find(word, at + 1)) {
    const std::size_t digits = NumberAt(name, at + word.size());
    std::uint64_t number = 0;
    const char* first = name.data() + at + word.size();
    if (digits != 0 && std::from_chars(first, first + digits, number).ec == std::errc())
      return number;
  }
  return std::nullopt;
}

}  // namespace

Result<NamePattern> NamePattern::Create(const std::string& expression) {
  const auto bad = [&](std::string_view why) {
    return Status(Code::kInvalidArgument,
                  fmt::format("bad expression '{}': {}", expression.substr(0, 80), why),
                  Reason::kMalformed);
  };
  if (expression.size() > kMaxExpressionBytes) return bad("too long");
  NamePattern pattern;
  try {
    pattern.regex_ = std::regex(expression, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error& error) {
    return bad(error.what());
  }
  pattern.plain_ = !MayReadNumbers(expression);
  return pattern;
}

bool NamePattern::Found(const std::string& name) const {
  const auto search = [&](const std::string& text) {
    try {
      return std::regex_search(text, regex_);
    } catch (const std::regex_error&) {
      return false;  // too complex for this text: the library's own limit
    }
  };
  if (!plain_) return search(name);
  std::string plain = PlainName(name);
  const auto known = known_.find(plain);
  if (known != known_.end()) return known->second;
  return known_[std::move(plain)] = search(name);
}

std::string PlainName(std::string_view name) {
  std::string plain;
  plain.reserve(name.size());
  for (std::size_t i = 0; i < name.size();) {
    const std::size_t digits =
        IsDigit(name[i]) && FollowsNumberedWord(name, i) ? NumberAt(name, i) : 0;
    if (digits == 0) {
      plain += name[i++];
    } else {
      plain += '0';
      i += digits;
    }
  }
  return plain;
}

std::optional<std::uint64_t> LayerOf(std::string_view name) {
  constexpr std::string_view kPrefix = "language_model.";
  constexpr std::string_view kLayers = "model.layers.";
  if (name.substr(0, kPrefix.size()) == kPrefix) name.remove_prefix(kPrefix.size());
  if (name.substr(0, kLayers.size()) != kLayers) return std::nullopt;
  return NumberAfter(name, kLayers);
}

std::optional<std::uint64_t> ExpertOf(std::string_view name) {
  if (name.find("shared") != std::string_view::npos) return std::nullopt;
  return NumberAfter(name, "experts.");
}

Result<std::uint32_t> StageOf(std::string_view name, std::string_view class_name,
                              std::span<const std::uint32_t> layers_per_stage) {
  if (layers_per_stage.empty()) {
    return Status(Code::kInvalidArgument, "placement PP: pp_layers is not given",
                  Reason::kMalformed);
  }
  const auto last = static_cast<std::uint32_t>(layers_per_stage.size() - 1);
  const auto layer = LayerOf(name);
  if (!layer) return class_name == "head" || class_name == "norm" ? last : 0;
  std::uint64_t before = 0;
  for (std::uint32_t stage = 0; stage <= last; ++stage) {
    before += layers_per_stage[stage];
    if (*layer < before) return stage;
  }
  return last;
}

}  // namespace tensorbus::planner
