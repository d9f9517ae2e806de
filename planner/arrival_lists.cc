#include "planner/arrival_lists.h"

#include <algorithm>

namespace tensorbus::planner {

void ArrivalLists::Clear() {
  lists_.clear();
  partings_.clear();
}

std::uint32_t ArrivalLists::Begin() {
  lists_.emplace_back();
  return static_cast<std::uint32_t>(lists_.size() - 1);
}

std::uint32_t ArrivalLists::Other(std::uint32_t list, const Arrival& arrival) {
  auto longer = static_cast<std::uint32_t>(lists_.size());
  if (lists_[list].longer != kNone) {
    partings_.try_emplace({list, lists_[list].next}, lists_[list].longer);
    longer = partings_.try_emplace({list, arrival}, longer).first->second;
  }
  if (longer == lists_.size()) lists_.push_back({.before = list, .last = arrival});
  lists_[list].longer = longer;
  lists_[list].next = arrival;
  return longer;
}

void ArrivalLists::Read(std::uint32_t list, std::vector<Arrival>* arrivals) const {
  const auto begin = static_cast<std::ptrdiff_t>(arrivals->size());
  for (; lists_[list].before != kNone; list = lists_[list].before)
    arrivals->push_back(lists_[list].last);
  std::reverse(arrivals->begin() + begin, arrivals->end());
}

}  // namespace tensorbus::planner
