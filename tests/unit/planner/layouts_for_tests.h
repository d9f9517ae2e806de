#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "planner/plan.h"
#include "tensorbus/types/placement.h"

namespace tensorbus::planner {

inline Shape MakeShape(const std::vector<std::uint64_t>& dims) {
  return Shape::Create(dims).value();
}
inline Box MakeBox(const std::vector<Range>& ranges) {
  return Box(ranges);
}
inline Placement Shard(int dim) {
  return {Placement::Kind::kShard, dim, 1};
}
inline Placement Strided(int dim, std::uint64_t factor) {
  return {Placement::Kind::kStridedShard, dim, factor};
}
inline DeviceMesh Mesh(const std::vector<std::uint32_t>& sizes) {
  DeviceMesh mesh;
  for (const std::uint32_t size : sizes) mesh.axes.push_back({"m", size});
  return mesh;
}
inline std::uint32_t RanksOf(const DeviceMesh& mesh) {
  std::uint32_t ranks = 1;
  for (const DeviceMesh::Axis& axis : mesh.axes) ranks *= axis.size;
  return ranks;
}
/// A job that holds `specs` all alike.
inline JobLayout JobOf(std::uint32_t ranks, std::vector<TensorSpec> specs, Holding holding) {
  JobLayout job;
  job.rank_count = ranks;
  for (TensorSpec& spec : specs) job.tensors.push_back({std::move(spec), 0});
  job.holdings.push_back(std::move(holding));
  return job;
}

/// Whether a rank holds an element, by asking its boxes.
inline bool Holds(const Holding& holding, std::uint32_t rank,
                  const std::vector<std::uint64_t>& at) {
  for (const RankBoxes& held : holding.ranks) {
    if (held.rank != rank) continue;
    for (const Box& box : held.boxes) {
      bool inside = true;
      for (std::size_t d = 0; d < at.size(); ++d) {
        const Range& range = box[static_cast<int>(d)];
        inside = inside && range.lo <= at[d] && at[d] < range.hi;
      }
      if (inside) return true;
    }
  }
  return false;
}

/// Calls `use` with every index of a shape.
template <typename Use>
void ForEachIndex(const Shape& shape, Use use) {
  std::vector<std::uint64_t> at(static_cast<std::size_t>(shape.rank()), 0);
  for (std::uint64_t i = 0; i < shape.elements(); ++i) {
    std::uint64_t rest = i;
    for (std::size_t d = at.size(); d-- > 0;) {
      at[d] = rest % shape[static_cast<int>(d)];
      rest /= shape[static_cast<int>(d)];
    }
    use(at);
  }
}

/// Every op of a plan, for tests that look at them all or change some.
inline std::vector<CopyOp> AllOps(const Plan& plan) {
  std::vector<CopyOp> ops;
  for (const Route& route : plan.routes) {
    for (const CopyOp& op : OpsOf(plan, route)) ops.push_back(op);
  }
  return ops;
}

/// Element by element: a target passes on only what it has received, from another device, in a
/// lower round. Empty when all is well, else the first fault.
inline std::string RelayFault(const JobLayout& target, const Plan& plan) {
  for (const Route& route : plan.routes) {
    if (!route.relayed) continue;
    for (const CopyOp& op : OpsOf(plan, route)) {
      std::string fault;
      ForEachIndex(target.tensors[op.tensor].spec.shape, [&](const std::vector<std::uint64_t>& at) {
        if (!Holds(Holding{{{0, {op.box}}}}, 0, at)) return;
        bool arrived = false;
        for (const Route& into : plan.routes) {
          if (into.target != op.source || into.local || into.round >= route.round) continue;
          for (const CopyOp& before : OpsOf(plan, into)) {
            arrived = arrived ||
                      (before.tensor == op.tensor && Holds(Holding{{{0, {before.box}}}}, 0, at));
          }
        }
        if (!arrived) fault = "target " + std::to_string(op.source) + " passes on what it has not";
      });
      if (!fault.empty()) return fault;
    }
  }
  return "";
}

/// The plan that has these ops, in this order, and whose tables agree with them; each route has a
/// round of its own.
inline Plan PlanOf(const std::vector<CopyOp>& ops, const JobLayout& target) {
  Plan plan;
  std::set<Box> boxes;
  for (const CopyOp& op : ops) boxes.insert(op.box);
  plan.boxes.assign(boxes.begin(), boxes.end());
  for (const CopyOp& op : ops) {
    const bool same = !plan.routes.empty() && plan.routes.back().source == op.source &&
                      plan.routes.back().target == op.target;
    if (!same) {
      plan.routes.push_back(
          {op.source, op.target, plan.ops.size(), 0, 0, op.local, op.relayed, plan.round_count++});
    }
    ++plan.routes.back().op_count;
    const std::uint64_t item_bytes =
        op.tensor < target.tensors.size() ? ItemBytes(target.tensors[op.tensor].spec.dtype) : 1;
    plan.routes.back().bytes += op.box.volume() * item_bytes;
    const auto box = std::lower_bound(plan.boxes.begin(), plan.boxes.end(), op.box);
    plan.ops.push_back({op.tensor, static_cast<std::uint32_t>(box - plan.boxes.begin())});
  }
  return plan;
}

/// Two jobs as large models have them, in small: layers of a few classes, replicated and sharded,
/// evenly and not, fused rows in two boxes a rank, experts that only some ranks hold. Six sources,
/// four targets; `layers` of 10 tensors each.
struct JobPair {
  JobLayout source;
  JobLayout target;
};
inline JobPair SmallModel(std::uint32_t layers) {
  JobPair pair;
  pair.source.rank_count = 6;
  pair.target.rank_count = 4;
  const auto add = [&](const std::string& name, DType dtype, const Shape& shape, Holding source,
                       Holding target) {
    const auto holding = [](JobLayout& job, Holding&& one) {
      const auto at = std::find(job.holdings.begin(), job.holdings.end(), one);
      const auto number = static_cast<std::uint32_t>(at - job.holdings.begin());
      if (at == job.holdings.end()) job.holdings.push_back(std::move(one));
      return number;
    };
    pair.source.tensors.push_back({{name, dtype, shape}, holding(pair.source, std::move(source))});
    pair.target.tensors.push_back({{name, dtype, shape}, holding(pair.target, std::move(target))});
  };
  const auto on = [](const Shape& shape, std::vector<std::uint32_t> mesh,
                     std::vector<Placement> placements) {
    return Resolve(Mesh(mesh), placements, shape, RanksOf(Mesh(mesh))).value();
  };
  const auto whole_at = [](const Shape& shape, std::vector<std::uint32_t> ranks) {
    Holding holding;
    for (const std::uint32_t rank : ranks) holding.ranks.push_back({rank, {Box::Whole(shape)}});
    return holding;
  };
  const Placement copy;
  const Shape square = MakeShape({14, 12});
  const Shape vector = MakeShape({14});
  const Shape fused = MakeShape({16, 5});
  Holding halves;  // rows 4r and 8 + 4r on, as fused gate and up lie
  for (std::uint32_t r = 0; r < 4; ++r) {
    const std::uint64_t lo = r % 2 * 4;
    halves.ranks.push_back(
        {r, {MakeBox({{lo, lo + 4}, {0, 5}}), MakeBox({{8 + lo, 12 + lo}, {0, 5}})}});
  }
  for (std::uint32_t l = 0; l < layers; ++l) {
    const std::string layer = "layers." + std::to_string(l) + ".";
    add(layer + "q", DType::kBf16, square, on(square, {6}, {Shard(0)}),
        on(square, {2, 2}, {copy, Shard(0)}));
    add(layer + "o", DType::kBf16, square, on(square, {6}, {Shard(0)}),
        on(square, {2, 2}, {copy, Shard(1)}));
    add(layer + "up", DType::kF32, square, on(square, {2, 3}, {copy, Shard(0)}),
        on(square, {4}, {Shard(1)}));
    add(layer + "norm", DType::kF32, vector, on(vector, {6}, {copy}), on(vector, {4}, {copy}));
    add(layer + "bias", DType::kF32, vector, on(vector, {6}, {Shard(0)}), on(vector, {4}, {copy}));
    add(layer + "fused", DType::kF8e4m3, fused, on(fused, {3, 2}, {Shard(0), Shard(1)}), halves);
    for (std::uint32_t e = 0; e < 4; ++e) {
      add(layer + "experts." + std::to_string(e), DType::kBf16, square,
          whole_at(square, {e % 2 * 3, e % 2 * 3 + 1}), whole_at(square, {e}));
    }
  }
  return pair;
}

/// Element by element: every needed element is written once, from a rank that holds it, and nothing
/// else is. Empty when all is well, else the first fault.
inline std::string ElementFault(const JobLayout& source, const JobLayout& target,
                                const Plan& plan) {
  const std::vector<CopyOp> ops = AllOps(plan);
  for (std::uint32_t t = 0; t < target.tensors.size(); ++t) {
    const JobLayout::Tensor& wanted = target.tensors[t];
    const Holding* held = nullptr;
    for (const JobLayout::Tensor& tensor : source.tensors) {
      if (tensor.spec.name == wanted.spec.name) held = &source.HoldingOf(tensor);
    }
    for (std::uint32_t rank = 0; rank < target.rank_count; ++rank) {
      std::string fault;
      ForEachIndex(wanted.spec.shape, [&](const std::vector<std::uint64_t>& at) {
        int writes = 0;
        for (const CopyOp& op : ops) {
          if (op.tensor != t || op.target != rank) continue;
          const Holding one{{{0, {op.box}}}};
          if (!Holds(one, 0, at)) continue;
          ++writes;
          const Holding& sender = op.relayed ? target.HoldingOf(wanted) : *held;
          if (!Holds(sender, op.source, at)) fault = "from a rank that does not hold it";
        }
        const int wants = Holds(target.HoldingOf(wanted), rank, at) ? 1 : 0;
        if (writes != wants) fault = std::to_string(writes) + " writes";
      });
      if (!fault.empty())
        return wanted.spec.name + ": target " + std::to_string(rank) + ": " + fault;
    }
  }
  return "";
}

}  // namespace tensorbus::planner
