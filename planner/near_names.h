#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tensorbus::planner {

/// Collects the names that look most like a wanted one: fewest characters outside the common prefix
/// and suffix. For error messages. Borrows the names.
class NearNames {
 public:
  explicit NearNames(std::string_view wanted) : wanted_(wanted) {}

  void Consider(std::string_view name);
  /// The best few, best first.
  std::vector<std::string> Take();
  /// "; near: 'a', 'b'", or nothing.
  static std::string Hint(const std::vector<std::string>& names);

 private:
  std::string_view wanted_;
  std::vector<std::pair<std::size_t, std::string_view>> scored_;
};

}  // namespace tensorbus::planner
