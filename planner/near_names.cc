#include "planner/near_names.h"

#include <algorithm>
#include <fmt/format.h>

namespace tensorbus::planner {

void NearNames::Consider(std::string_view name) {
  const std::size_t shorter = std::min(wanted_.size(), name.size());
  const std::size_t longer = std::max(wanted_.size(), name.size());
  std::size_t prefix = 0;
  while (prefix < shorter && wanted_[prefix] == name[prefix]) ++prefix;
  std::size_t suffix = 0;
  while (prefix + suffix < shorter &&
         wanted_[wanted_.size() - 1 - suffix] == name[name.size() - 1 - suffix]) {
    ++suffix;
  }
  const std::size_t common = prefix + suffix;
  if (2 * common >= longer) scored_.emplace_back(longer - common, name);
}

std::vector<std::string> NearNames::Take() {
  constexpr std::size_t kNear = 5;
  std::sort(scored_.begin(), scored_.end());
  std::vector<std::string> names;
  for (const auto& [score, name] : scored_) {
    if (names.size() == kNear) break;
    names.emplace_back(name);
  }
  return names;
}

std::string NearNames::Hint(const std::vector<std::string>& names) {
  if (names.empty()) return "";
  return fmt::format("; near: '{}'", fmt::join(names, "', '"));
}

}  // namespace tensorbus::planner
