#include "simulate/max_min.h"

#include <algorithm>

namespace tensorbus::simulate {
namespace {

/// What is left of a sum after so much of it was taken away is mostly rounding.
constexpr double kRenew = 1e-4;

/// For a heap with the lowest level on top.
constexpr auto kHigher = [](const auto& a, const auto& b) { return a.level > b.level; };

}  // namespace

MaxMinShares::MaxMinShares(std::span<const Demand> demands, std::span<const double> capacities)
    : demands_(demands),
      fresh_(capacities.size()),
      first_(capacities.size() + 1),
      frozen_(demands.size()),
      out_(demands.size()) {
  for (const Demand& demand : demands_) {
    for (const Hop& hop : demand.hops) {
      fresh_[hop.link].growth += hop.cost * demand.weight;
      ++first_[hop.link + 1];
    }
  }
  for (std::size_t l = 0; l < fresh_.size(); ++l) {
    Link& link = fresh_[l];
    link.left = capacities[l];
    link.exact = link.growth;
    link.open = first_[l + 1];
    first_[l + 1] += first_[l];
  }
  users_.resize(first_.back());
  std::vector<std::uint32_t> next(first_.begin(), first_.end() - 1);
  for (std::uint32_t f = 0; f < demands_.size(); ++f) {
    for (const Hop& hop : demands_[f].hops) users_[next[hop.link]++] = f;
  }
}

std::span<const Allotment> MaxMinShares::Run() {
  links_ = fresh_;
  frozen_.assign(demands_.size(), false);
  out_.assign(demands_.size(), {});
  full_links_.clear();
  for (std::uint32_t l = 0; l < links_.size(); ++l) PushLink(l);
  caps_.clear();
  for (std::uint32_t f = 0; f < demands_.size(); ++f) {
    if (demands_[f].cap < std::numeric_limits<double>::infinity())
      caps_.push_back({demands_[f].cap / demands_[f].weight, f});
  }
  std::sort(caps_.begin(), caps_.end(), [](const Stop& a, const Stop& b) {
    return a.level != b.level ? a.level < b.level : a.index < b.index;
  });
  auto cap = caps_.begin();
  while (cap != caps_.end() || !full_links_.empty()) {
    if (cap != caps_.end() && (full_links_.empty() || cap->level <= full_links_.front().level)) {
      if (!frozen_[cap->index]) Freeze(cap->index, cap->level, kNoLink);
      ++cap;
      continue;
    }
    std::pop_heap(full_links_.begin(), full_links_.end(), kHigher);
    const Stop stop = full_links_.back();
    full_links_.pop_back();
    FillLink(stop.index, stop.level);
  }
  return out_;
}

double MaxMinShares::LevelOf(const Link& link) {
  return link.open == 0 ? std::numeric_limits<double>::infinity()
                        : std::max(0.0, link.left) / link.growth;
}

void MaxMinShares::PushLink(std::uint32_t link) {
  if (links_[link].open == 0) return;
  full_links_.push_back({LevelOf(links_[link]), link});
  std::push_heap(full_links_.begin(), full_links_.end(), kHigher);
}

void MaxMinShares::FillLink(std::uint32_t link, double level) {
  // The level of a link only rises as flows stop elsewhere; an entry from before is renewed.
  if (LevelOf(links_[link]) > level * (1 + 1e-12)) return PushLink(link);
  for (std::uint32_t i = first_[link]; i < first_[link + 1]; ++i) {
    if (!frozen_[users_[i]]) Freeze(users_[i], level, link);
  }
}

void MaxMinShares::Freeze(std::uint32_t flow, double level, std::uint32_t held_by) {
  const Demand& demand = demands_[flow];
  frozen_[flow] = true;
  out_[flow] = {level * demand.weight, held_by};
  for (const Hop& hop : demand.hops) {
    Link& link = links_[hop.link];
    link.left -= hop.cost * out_[flow].rate;
    link.growth -= hop.cost * demand.weight;
    --link.open;
    if (link.growth < kRenew * link.exact) Renew(hop.link);
  }
}

void MaxMinShares::Renew(std::uint32_t link) {
  double growth = 0;
  for (std::uint32_t i = first_[link]; i < first_[link + 1]; ++i) {
    if (frozen_[users_[i]]) continue;
    for (const Hop& hop : demands_[users_[i]].hops) {
      if (hop.link == link) growth += hop.cost * demands_[users_[i]].weight;
    }
  }
  links_[link].growth = links_[link].exact = growth;
}

}  // namespace tensorbus::simulate
