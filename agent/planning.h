#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "planner/class_plan.h"
#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::agent {

/// One agent's share of a session, as the daemon named it.
struct SessionParticipant {
  std::string agent;
  std::string host;
  std::vector<std::string> endpoints;
  std::vector<std::uint32_t> source_ranks;
  std::vector<std::uint32_t> target_ranks;
};

Hash128 HashOf(const planner::Topology& topology);

/// What a plan depends on, and so what identifies it.
struct PlanKey {
  Hash128 source;
  Hash128 target;
  Hash128 topology;

  friend auto operator<=>(const PlanKey&, const PlanKey&) = default;
};

/// The class-level plan of all ranks with what it was made from. Immutable, shared by sessions;
/// what single ranks do is written out when they are bound.
struct PreparedPlan {
  std::shared_ptr<const JobLayout> source;
  std::shared_ptr<const JobLayout> target;
  planner::Topology topology;
  planner::ClassPlan classes;
  double plan_seconds = 0;
};

/// Plans. Pure; for a worker thread.
Result<std::shared_ptr<const PreparedPlan>> MakePlan(std::shared_ptr<const JobLayout> source,
                                                     std::shared_ptr<const JobLayout> target,
                                                     const planner::Topology& topology);

/// The ops of some ranks, certified. Pure; for a worker thread.
Result<planner::Plan> OwnPart(const PreparedPlan& plan, planner::RankSelection ranks);

/// Parses a fetched layout and makes sure that it is the one asked for.
Result<std::shared_ptr<const JobLayout>> ParseLayout(std::span<const std::byte> bytes,
                                                     const Hash128& expected);

/// The values used last, by key; a handful, so that a list is fastest. Confined.
template <typename Key, typename Value>
class RecentCache {
 public:
  explicit RecentCache(std::size_t count_max) : count_max_(count_max) {}

  /// The value, or null.
  std::shared_ptr<const Value> Find(const Key& key) {
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      if (it->first != key) continue;
      entries_.splice(entries_.begin(), entries_, it);
      return entries_.front().second;
    }
    return nullptr;
  }
  void Add(const Key& key, std::shared_ptr<const Value> value) {
    if (Find(key) != nullptr) return;
    entries_.emplace_front(key, std::move(value));
    if (entries_.size() > count_max_) entries_.pop_back();
  }
  std::size_t size() const { return entries_.size(); }
  /// Used last comes first.
  const std::list<std::pair<Key, std::shared_ptr<const Value>>>& entries() const {
    return entries_;
  }

 private:
  std::size_t count_max_;
  std::list<std::pair<Key, std::shared_ptr<const Value>>> entries_;
};

using LayoutCache = RecentCache<Hash128, JobLayout>;
using PlanCache = RecentCache<PlanKey, PreparedPlan>;

}  // namespace tensorbus::agent
