#pragma once

#include <cstdint>
#include <optional>
#include <regex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tensorbus/base/status.h"

namespace tensorbus::planner {

/// A regular expression (ECMAScript) searched in tensor names. Models repeat names layer by layer
/// and expert by expert, so answers are kept by PlainName() where the expression cannot tell these
/// apart. Confined.
class NamePattern {
 public:
  /// Error: kInvalidArgument for an expression that is malformed or longer than 4096 characters.
  static Result<NamePattern> Create(const std::string& expression);

  bool Found(const std::string& name) const;
  /// Whether all names of one PlainName() get one answer.
  bool plain() const { return plain_; }

 private:
  std::regex regex_;
  bool plain_ = false;
  mutable std::unordered_map<std::string, bool> known_;
};

/// The name with every layer, block and expert number replaced by 0.
std::string PlainName(std::string_view name);

/// The decoder layer of a language model's tensor; other stacks (vision) count as outside.
std::optional<std::uint64_t> LayerOf(std::string_view name);

/// The expert a routed expert's tensor belongs to.
std::optional<std::uint64_t> ExpertOf(std::string_view name);

/// The pipeline stage that holds a tensor, given layers per stage: its layer's; without a layer,
/// the last for the classes "head" and "norm", else the first. Layers past the end are on the last
/// stage. Error: kInvalidArgument when there are no stages.
Result<std::uint32_t> StageOf(std::string_view name, std::string_view class_name,
                              std::span<const std::uint32_t> layers_per_stage);

}  // namespace tensorbus::planner
