#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "planner/numbering.h"
#include "planner/plan.h"

namespace tensorbus::planner {

/// A box of each of a run of tensors of one class takes a path.
struct Passage {
  std::uint32_t box = 0;    ///< index into ClassPlan::boxes
  std::uint32_t first = 0;  ///< places in TensorClass::tensors: [first, last)
  std::uint32_t last = 0;
  std::uint32_t path = 0;  ///< in ClassPlan::paths

  friend auto operator<=>(const Passage&, const Passage&) = default;
};

/// Routes that the same bytes take: one, or with relays all along a tree, each after the one that
/// feeds it. Many boxes share a path, so what is said of each of its routes is said once.
struct PathTable {
  std::vector<std::uint32_t> routes;        ///< path by path; each index into ClassPlan::routes
  std::vector<std::uint32_t> starts = {0};  ///< path p is routes[starts[p] … starts[p + 1])

  std::size_t size() const { return starts.size() - 1; }
  std::span<const std::uint32_t> operator[](std::size_t path) const {
    return std::span(routes).subspan(starts[path], starts[path + 1] - starts[path]);
  }
  /// Ends the path that was last added to `routes`; its number.
  std::uint32_t Close() {
    starts.push_back(static_cast<std::uint32_t>(routes.size()));
    return static_cast<std::uint32_t>(starts.size() - 2);
  }
};

/// Tensors of one shape and dtype that both sides hold alike.
struct TensorClass {
  DType dtype = DType::kF32;
  Shape shape;
  std::uint32_t source_holding = 0;
  std::uint32_t target_holding = 0;
  std::vector<std::uint32_t> tensors;  ///< target tensors, ascending
};

/// What one target needs of one region: the smallest thing that holders are chosen for.
struct Cell {
  std::uint32_t box = 0;
  std::uint32_t holders = 0;  ///< set of source ranks
  std::uint32_t targets = 0;  ///< set of target ranks that need it in one of their boxes
};

/// Two layouts laid over each other: all that planning needs to know of them, whatever the topology
/// and whoever is lost. Cells name boxes and sets of ranks by their numbers in the tables. Borrows
/// the layouts.
struct LayoutMatch {
  const JobLayout* source = nullptr;
  const JobLayout* target = nullptr;
  std::vector<TensorClass> classes;      ///< by first tensor
  std::vector<std::vector<Cell>> cells;  ///< by class; ordered by target box, then region
  BoxTable boxes;
  RankSets rank_sets;
  Hash128 digest;  ///< of ranks, names, shapes and classes
};

/// The plan before it is written out per tensor: small, so that every agent can make it whole,
/// compare the digest and write out no more than its own part.
struct ClassPlan {
  std::vector<TensorClass> classes;            ///< by first tensor
  std::vector<std::vector<Passage>> passages;  ///< by class; by box, first
  PathTable paths;
  std::vector<Box> boxes;     ///< as in Plan
  std::vector<Route> routes;  ///< as in Plan
  std::uint32_t round_count = 0;
  PlanOptions options;  ///< as asked for
  Hash128 digest;
};

/// Groups the target's tensors. Errors as BuildPlan(): unknown names, other shapes or dtypes.
Result<std::vector<TensorClass>> Classify(const JobLayout& source, const JobLayout& target,
                                          PlanFault* fault);

/// Groups the target's tensors and intersects what sources hold with what targets need. With
/// relays, boxes of targets that overlap are cut, so that no element is in two cells. Errors as
/// BuildPlan(), all but those of the topology.
Result<LayoutMatch> MatchLayouts(const JobLayout& source, const JobLayout& target,
                                 const PlanOptions& options, PlanFault* fault);

/// Chooses holders and cuts where balance wants it, makes routes and rounds. Errors as BuildPlan(),
/// but those of matching.
Result<ClassPlan> BuildClassPlan(const LayoutMatch& match, const Topology& topology,
                                 PlanFault* fault = nullptr, const PlanOptions& options = {});

/// The plan of all ranks.
Plan WriteOut(const ClassPlan& plan);

/// The part of it that some ranks take part in: the routes that one of them sends or receives on,
/// with their rounds and ops as in the plan of all ranks. Same digest.
Plan PlanForRanks(const ClassPlan& plan, const RankSelection& ranks);

}  // namespace tensorbus::planner
