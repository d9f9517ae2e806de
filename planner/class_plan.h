#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/numbering.h"
#include "planner/plan.h"

namespace tensorbus::planner {

/// A copy that happens for a run of tensors of one class.
struct Transfer {
  std::uint32_t target = 0;
  std::uint32_t source = 0;  ///< source rank; beyond hop 0 a target rank that has the box by then
  std::uint32_t box = 0;     ///< index into ClassPlan::boxes
  std::uint32_t first = 0;  ///< places in TensorClass::tensors: [first, last)
  std::uint32_t last = 0;
  std::uint32_t hop = 0;    ///< how often the bytes were passed on before
  std::uint32_t route = 0;  ///< index into ClassPlan::routes
  bool local = false;
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

/// Two layouts laid over each other: all that planning needs to know of them, whatever the
/// topology. Cells name boxes and sets of ranks by their numbers in the tables.
struct LayoutMatch {
  std::vector<TensorClass> classes;      ///< by first tensor
  std::vector<std::vector<Cell>> cells;  ///< by class; ordered by target box, then region
  BoxTable boxes;
  RankSets rank_sets;
};

/// The plan before it is written out per tensor: small whatever the number of tensors.
struct ClassPlan {
  std::vector<TensorClass> classes;              ///< by first tensor
  std::vector<std::vector<Transfer>> transfers;  ///< by class; by target, hop, source, box, first
  std::vector<Box> boxes;                        ///< as in Plan
  std::vector<Route> routes;                     ///< as in Plan
  std::uint32_t round_count = 0;
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

/// Chooses holders and cuts where balance wants it. Errors as BuildPlan().
Result<ClassPlan> BuildClassPlan(const JobLayout& source, const JobLayout& target,
                                 const Topology& topology, PlanFault* fault,
                                 const PlanOptions& options);

}  // namespace tensorbus::planner
