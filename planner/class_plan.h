#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/balance.h"
#include "planner/plan.h"

namespace tensorbus::planner {

/// A copy that happens for a run of tensors of one class.
struct Transfer {
  std::uint32_t target = 0;
  std::uint32_t source = 0;  ///< source rank; beyond hop 0 a target rank that has the box by then
  bool local = false;
  Box box;
  std::uint32_t first = 0;  ///< places in TensorClass::tensors: [first, last)
  std::uint32_t last = 0;
  std::uint32_t hop = 0;  ///< how often the bytes were passed on before
};

/// Tensors of one shape and dtype that both sides hold alike.
struct TensorClass {
  DType dtype = DType::kF32;
  Shape shape;
  std::uint32_t source_holding = 0;
  std::uint32_t target_holding = 0;
  std::vector<std::uint32_t> tensors;  ///< target tensors, ascending
  std::vector<Transfer> transfers;     ///< ordered by target, hop, source, box, first
};

/// The plan before it is written out per tensor: small whatever the number of tensors.
struct ClassPlan {
  std::vector<TensorClass> classes;  ///< by first tensor
  Hash128 digest;
};

/// What one target needs of one region: the smallest thing that holders are chosen for.
struct Cell {
  Box box;
  std::vector<std::uint32_t> holders;  ///< source ranks, ascending
  std::vector<std::uint32_t>
      targets;  ///< target ranks that need it in one of their boxes, ascending
};

/// Groups the target's tensors. Errors as BuildPlan(): unknown names, other shapes or dtypes.
Result<std::vector<TensorClass>> Classify(const JobLayout& source, const JobLayout& target,
                                          PlanFault* fault);

/// Intersects what sources hold with what targets need, ordered by target box, then region. Error:
/// kNoHolder; `fault` gets rank, box and candidates.
Result<std::vector<Cell>> CellsOf(const Holding& source, const Holding& target, PlanFault* fault);

/// Chooses holders and cuts where balance wants it. Errors as BuildPlan().
Result<ClassPlan> BuildClassPlan(const JobLayout& source, const JobLayout& target,
                                 const Topology& topology, PlanFault* fault,
                                 const PlanOptions& options);

/// Everything that must be sent point to point, by holders, whatever the nodes: what the bound of
/// the busiest source is computed from.
Result<std::vector<Supply>> SuppliesOf(const JobLayout& source, const JobLayout& target,
                                       const Topology& topology);

}  // namespace tensorbus::planner
