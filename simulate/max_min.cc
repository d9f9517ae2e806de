#include "simulate/max_min.h"

#include <algorithm>
#include <queue>

namespace tensorbus::simulate {
namespace {

/// Where a share stops growing: a link or a flow's cap, at a level of rate ÷ weight.
struct Stop {
  double level;
  std::uint32_t index;
  bool is_link;

  friend bool operator>(const Stop& a, const Stop& b) { return a.level > b.level; }
};

constexpr double kRenew = 1e-4;

class Filling {
 public:
  Filling(std::span<const Demand> demands, std::span<const double> capacities)
      : demands_(demands),
        left_(capacities.begin(), capacities.end()),
        growth_(capacities.size()),
        first_(capacities.size() + 1),
        out_(demands.size()),
        frozen_(demands.size()) {
    for (const Demand& demand : demands_) {
      for (const Hop& hop : demand.hops) {
        growth_[hop.link] += hop.cost * demand.weight;
        ++first_[hop.link + 1];
      }
    }
    for (std::size_t l = 1; l < first_.size(); ++l) first_[l] += first_[l - 1];
    users_.resize(first_.back());
    std::vector<std::uint32_t> next(first_.begin(), first_.end() - 1);
    for (std::uint32_t f = 0; f < demands_.size(); ++f) {
      for (const Hop& hop : demands_[f].hops) users_[next[hop.link]++] = f;
    }
    for (std::size_t l = 0; l < left_.size(); ++l) open_.push_back(first_[l + 1] - first_[l]);
    exact_ = growth_;
  }

  std::vector<Allotment> Run() {
    for (std::uint32_t l = 0; l < left_.size(); ++l) PushLink(l);
    for (std::uint32_t f = 0; f < demands_.size(); ++f) {
      if (demands_[f].cap < std::numeric_limits<double>::infinity())
        stops_.push({demands_[f].cap / demands_[f].weight, f, false});
    }
    while (!stops_.empty()) {
      const Stop stop = stops_.top();
      stops_.pop();
      if (!stop.is_link) {
        if (!frozen_[stop.index]) Freeze(stop.index, stop.level, kNoLink);
        continue;
      }
      // The level of a link only rises as flows stop elsewhere; an entry from before is renewed.
      const double level = LevelOf(stop.index);
      if (level > stop.level * (1 + 1e-12)) {
        PushLink(stop.index);
        continue;
      }
      for (std::uint32_t i = first_[stop.index]; i < first_[stop.index + 1]; ++i) {
        if (!frozen_[users_[i]]) Freeze(users_[i], stop.level, stop.index);
      }
    }
    return std::move(out_);
  }

 private:
  double LevelOf(std::uint32_t link) const {
    return open_[link] == 0 ? std::numeric_limits<double>::infinity()
                            : std::max(0.0, left_[link]) / growth_[link];
  }
  void PushLink(std::uint32_t link) {
    if (open_[link] != 0) stops_.push({LevelOf(link), link, true});
  }
  void Freeze(std::uint32_t flow, double level, std::uint32_t link) {
    const Demand& demand = demands_[flow];
    frozen_[flow] = true;
    out_[flow] = {level * demand.weight, link};
    for (const Hop& hop : demand.hops) {
      left_[hop.link] -= hop.cost * out_[flow].rate;
      growth_[hop.link] -= hop.cost * demand.weight;
      --open_[hop.link];
      // What is left of a sum after most of it was taken away is mostly rounding.
      if (growth_[hop.link] < kRenew * exact_[hop.link]) Renew(hop.link);
    }
  }
  void Renew(std::uint32_t link) {
    growth_[link] = 0;
    for (std::uint32_t i = first_[link]; i < first_[link + 1]; ++i) {
      if (frozen_[users_[i]]) continue;
      for (const Hop& hop : demands_[users_[i]].hops) {
        if (hop.link == link) growth_[link] += hop.cost * demands_[users_[i]].weight;
      }
    }
    exact_[link] = growth_[link];
  }

  std::span<const Demand> demands_;
  std::vector<double> left_;          // by link: capacity not yet given away for good
  std::vector<double> growth_;        // by link: bytes/s it takes when all shares grow by one
  std::vector<double> exact_;         // by link: the same when it was last added up
  std::vector<std::uint32_t> first_;  // by link: its flows are users_[first_[l] … first_[l + 1])
  std::vector<std::uint32_t> users_;
  std::vector<std::uint32_t> open_;  // by link: flows that still grow
  std::vector<Allotment> out_;
  std::vector<bool> frozen_;
  std::priority_queue<Stop, std::vector<Stop>, std::greater<>> stops_;
};

}  // namespace

std::vector<Allotment> MaxMinShares(std::span<const Demand> demands,
                                    std::span<const double> capacities) {
  return Filling(demands, capacities).Run();
}

}  // namespace tensorbus::simulate
