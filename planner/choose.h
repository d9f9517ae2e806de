#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/class_plan.h"
#include "planner/topology.h"

namespace tensorbus::planner {

/// Tells routes apart.
struct RouteKey {
  std::uint32_t target = 0;
  std::uint32_t source = 0;  ///< source rank; beyond hop 0 a target rank that has the bytes by then
  std::uint32_t hop = 0;     ///< how often the bytes were passed on before
  bool local = false;

  friend bool operator==(const RouteKey&, const RouteKey&) = default;
};

struct HashOfRouteKey {
  std::size_t operator()(const RouteKey& key) const noexcept {
    // Odd factors with bits all over spread small numbers: 2^64 divided by the golden ratio, and a
    // prime of xxHash. Not Checksum64(), as for boxes: there is padding between the fields.
    const std::uint64_t ranks = std::uint64_t{key.target} << 32 | key.source;
    const std::uint64_t mixed = ranks * 0x9e3779b97f4a7c15U + key.hop * 0xc2b2ae3d27d4eb4fU;
    return static_cast<std::size_t>(mixed ^ mixed >> 29);
  }
};

/// Which boxes take which paths, before routes and boxes get their final numbers.
class ChosenPaths {
 public:
  ChosenPaths(std::size_t class_count, std::size_t known_boxes)
      : by_class(class_count), cuts_begin(static_cast<std::uint32_t>(known_boxes)) {}

  /// The number of the part [lo, hi) of a box along a dimension.
  std::uint32_t Cut(const Box& box, int dim, std::uint64_t lo, std::uint64_t hi);
  /// The number of a new path along these routes.
  std::uint32_t AddPath(std::span<const RouteKey> along);
  /// The number of the path that is one route.
  std::uint32_t Direct(const RouteKey& key);
  /// Whether there is a route from `source` to where `path` begins.
  bool HasRouteFrom(std::uint32_t source, std::uint32_t path) const;
  /// The number of a path like `path`, but from another source: only the first route differs.
  std::uint32_t FromAnother(std::uint32_t path, std::uint32_t source);

  std::vector<std::vector<Passage>> by_class;  ///< in no particular order
  /// A box number below it is the match's; from there on it counts `cuts`.
  std::uint32_t cuts_begin;
  std::vector<Box> cuts;                       ///< may repeat each other
  Numbering<RouteKey, HashOfRouteKey> routes;  ///< as they were first taken
  PathTable paths;

 private:
  std::vector<std::uint32_t> direct_;  // by route: the path that it is by itself, or kNone
};

/// Chooses holders, none of them lost, for whatever ranks need that are not lost, and cuts where
/// balance wants it. Errors: kNoHolder for what only lost ranks held, kInvalidArgument for a lost
/// rank that is not there, kResourceExhausted as BuildPlan().
Result<ChosenPaths> ChooseHolders(const LayoutMatch& match, const TopologyIndex& places,
                                  const RankSelection& lost, PlanFault* fault);

/// The same with relays: every byte leaves the sources once. `match` must be one made for relays.
Result<ChosenPaths> ChooseRelays(const LayoutMatch& match, const TopologyIndex& places,
                                 const RankSelection& lost, PlanFault* fault);

}  // namespace tensorbus::planner
