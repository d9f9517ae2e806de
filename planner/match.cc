#include <algorithm>
#include <fmt/format.h>
#include <string_view>
#include <unordered_map>

#include "planner/class_plan.h"

namespace tensorbus::planner {
namespace {

/// Finds source tensors by name. Both sides mostly name them in one order, so the one after the
/// last hit is tried first and the map is only built when that fails.
class NameIndex {
 public:
  explicit NameIndex(const JobLayout& layout) : tensors_(layout.tensors) {}

  /// Index of the tensor, or -1.
  std::int64_t Find(std::string_view name) {
    if (guess_ < tensors_.size() && tensors_[guess_].spec.name == name)
      return static_cast<std::int64_t>(guess_++);
    if (map_.empty()) {
      map_.reserve(tensors_.size());
      for (std::size_t i = 0; i < tensors_.size(); ++i) map_.emplace(tensors_[i].spec.name, i);
    }
    const auto found = map_.find(name);
    if (found == map_.end()) return -1;
    guess_ = found->second + 1;
    return static_cast<std::int64_t>(found->second);
  }

 private:
  const std::vector<JobLayout::Tensor>& tensors_;
  std::unordered_map<std::string_view, std::size_t> map_;
  std::size_t guess_ = 0;
};

/// Source names that look most like `name`: longest common prefix and suffix together.
std::vector<std::string> NearNames(const JobLayout& source, std::string_view name) {
  constexpr std::size_t kNear = 5;
  std::vector<std::pair<std::size_t, std::string_view>> scored;
  for (const JobLayout::Tensor& tensor : source.tensors) {
    const std::string_view other = tensor.spec.name;
    const std::size_t shorter = std::min(name.size(), other.size());
    std::size_t prefix = 0;
    while (prefix < shorter && name[prefix] == other[prefix]) ++prefix;
    std::size_t suffix = 0;
    while (prefix + suffix < shorter &&
           name[name.size() - 1 - suffix] == other[other.size() - 1 - suffix]) {
      ++suffix;
    }
    const std::size_t longer = std::max(name.size(), other.size());
    if (2 * (prefix + suffix) >= longer) scored.emplace_back(longer - prefix - suffix, other);
  }
  std::sort(scored.begin(), scored.end());
  if (scored.size() > kNear) scored.resize(kNear);
  std::vector<std::string> near;
  for (const auto& [score, other] : scored) near.emplace_back(other);
  return near;
}

Status Unknown(const JobLayout& source, const std::string& name, PlanFault* fault) {
  PlanFault details;
  details.tensor = name;
  details.near_names = NearNames(source, name);
  std::string hint;
  for (const std::string& near : details.near_names)
    hint += fmt::format("{}'{}'", hint.empty() ? "; near: " : ", ", near);
  if (fault != nullptr) *fault = std::move(details);
  return {Code::kFailedPrecondition,
          fmt::format("tensor '{}': the source has no tensor of this name{}", name, hint),
          Reason::kUnknownTensor};
}

Status CheckAgree(const TensorSpec& source, const TensorSpec& target, PlanFault* fault) {
  if (source.dtype == target.dtype && source.shape == target.shape) return {};
  if (fault != nullptr) {
    *fault = {};
    fault->tensor = target.name;
  }
  if (source.shape != target.shape) {
    return {Code::kFailedPrecondition,
            fmt::format("tensor '{}': shape {} at the source, {} at the target", target.name,
                        source.shape.ToString(), target.shape.ToString()),
            Reason::kLayoutMismatch};
  }
  return {Code::kFailedPrecondition,
          fmt::format("tensor '{}': dtype {} at the source, {} at the target", target.name,
                      DTypeName(source.dtype), DTypeName(target.dtype)),
          Reason::kDtypeMismatch};
}

}  // namespace

Result<std::vector<TensorClass>> Classify(const JobLayout& source, const JobLayout& target,
                                          PlanFault* fault) {
  NameIndex names(source);
  std::vector<TensorClass> classes;
  // Holding pair -> classes of it; several only where shapes or dtypes differ.
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> by_holdings;
  for (std::uint32_t t = 0; t < target.tensors.size(); ++t) {
    const JobLayout::Tensor& wanted = target.tensors[t];
    const std::int64_t at = names.Find(wanted.spec.name);
    if (at < 0) return Unknown(source, wanted.spec.name, fault);
    const JobLayout::Tensor& held = source.tensors[static_cast<std::size_t>(at)];
    TB_RETURN_IF_ERROR(CheckAgree(held.spec, wanted.spec, fault));
    auto& same = by_holdings[std::uint64_t{held.holding} << 32 | wanted.holding];
    const auto found = std::find_if(same.begin(), same.end(), [&](std::uint32_t c) {
      return classes[c].dtype == wanted.spec.dtype && classes[c].shape == wanted.spec.shape;
    });
    if (found != same.end()) {
      classes[*found].tensors.push_back(t);
      continue;
    }
    same.push_back(static_cast<std::uint32_t>(classes.size()));
    classes.push_back(
        {wanted.spec.dtype, wanted.spec.shape, held.holding, wanted.holding, {t}, {}});
  }
  return classes;
}

}  // namespace tensorbus::planner
