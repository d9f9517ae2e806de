#include <algorithm>
#include <fmt/format.h>
#include <string_view>
#include <unordered_map>

#include "planner/class_plan.h"
#include "planner/near_names.h"

namespace tensorbus::planner {
namespace {

/// Finds source tensors by name. Both sides mostly name them in one order, one of them perhaps with
/// a few more, so those after the last hit are tried before a map of all names is made.
class NameIndex {
 public:
  explicit NameIndex(const JobLayout& layout) : tensors_(layout.tensors) {}

  /// Index of the tensor, or -1.
  std::int64_t Find(std::string_view name) {
    constexpr std::size_t kGuesses = 8;
    const std::size_t last = std::min(tensors_.size(), next_ + kGuesses);
    for (std::size_t at = next_; at < last; ++at) {
      if (tensors_[at].spec.name == name) return Hit(at);
    }
    if (map_.empty()) {
      map_.reserve(tensors_.size());
      for (std::size_t i = 0; i < tensors_.size(); ++i) map_.emplace(tensors_[i].spec.name, i);
    }
    const auto found = map_.find(name);
    return found == map_.end() ? -1 : Hit(found->second);
  }

 private:
  std::int64_t Hit(std::size_t at) {
    next_ = at + 1;
    return static_cast<std::int64_t>(at);
  }

  const std::vector<JobLayout::Tensor>& tensors_;
  std::unordered_map<std::string_view, std::size_t> map_;
  std::size_t next_ = 0;  // after the last hit
};

Status Unknown(const JobLayout& source, const std::string& name, PlanFault* fault) {
  PlanFault details;
  details.tensor = name;
  NearNames near(name);
  for (const JobLayout::Tensor& tensor : source.tensors) near.Consider(tensor.spec.name);
  details.near_names = near.Take();
  const std::string hint = NearNames::Hint(details.near_names);
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
    classes.push_back({wanted.spec.dtype, wanted.spec.shape, held.holding, wanted.holding, {t}});
  }
  return classes;
}

}  // namespace tensorbus::planner
