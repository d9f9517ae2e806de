#include "planner/cost.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "tensorbus/base/check.h"

namespace tensorbus::planner {
namespace {

/// Longer than anything takes; a few of them still add up.
constexpr std::uint64_t kNever = std::uint64_t{1} << 60;

std::uint64_t Times(std::uint64_t count, std::uint64_t ns) {
  std::uint64_t product = 0;
  return __builtin_mul_overflow(count, ns, &product) ? kNever : std::min(product, kNever);
}

std::uint64_t NsOf(std::uint64_t bytes, std::uint64_t bytes_per_us) {
  return Times(bytes / bytes_per_us, 1000) + Times(bytes % bytes_per_us, 1000) / bytes_per_us;
}

/// The box of `rank` that `inner` lies in.
const Box& BoxAround(const Holding& holding, std::uint32_t rank, const Box& inner) {
  const auto at =
      std::lower_bound(holding.ranks.begin(), holding.ranks.end(), rank,
                       [](const RankBoxes& held, std::uint32_t r) { return held.rank < r; });
  TB_CHECK(at != holding.ranks.end() && at->rank == rank);
  const auto box = std::find_if(at->boxes.begin(), at->boxes.end(),
                                [&](const Box& outer) { return outer.Contains(inner); });
  TB_CHECK(box != at->boxes.end());
  return *box;
}

/// How many pieces of `inner` are contiguous in both boxes around it.
std::uint64_t RunsOf(const Box& inner, const Box& sent_from, const Box& put_into) {
  int d = inner.rank();
  while (d > 0 && inner[d - 1] == sent_from[d - 1] && inner[d - 1] == put_into[d - 1]) --d;
  std::uint64_t runs = 1;  // dimension d - 1 is cut, but still in one piece
  for (int outer = 0; outer < d - 1; ++outer) runs *= inner[outer].size();
  return runs;
}

}  // namespace

const char* WindowKindName(WindowKind kind) {
  switch (kind) {
    case WindowKind::kContiguous:
      return "contiguous";
    case WindowKind::kStrided:
      return "strided";
    case WindowKind::kBucket:
      return "bucket";
    case WindowKind::kShard:
      return "shard";
  }
  return "";
}

std::vector<RouteShape> ShapesOf(const JobLayout& source, const JobLayout& target,
                                 const Plan& plan) {
  std::unordered_map<std::string_view, const JobLayout::Tensor*> held;
  for (const JobLayout::Tensor& tensor : source.tensors) held.emplace(tensor.spec.name, &tensor);
  std::vector<RouteShape> shapes;
  for (const Route& route : plan.routes) {
    RouteShape shape{route.bytes, route.op_count, 0, 0};
    const Box* last_box = nullptr;
    std::uint32_t last_tensor = 0;
    for (const RouteOp& op : std::span(plan.ops).subspan(route.first_op, route.op_count)) {
      const JobLayout::Tensor& wanted = target.tensors[op.tensor];
      const Holding& into = target.HoldingOf(wanted);
      const Holding& from = route.relayed ? into : source.HoldingOf(*held.at(wanted.spec.name));
      const Box& box = plan.boxes[op.box];
      const Box& sent_from = BoxAround(from, route.source, box);
      shape.run_count += RunsOf(box, sent_from, BoxAround(into, route.target, box));
      if (last_box != &sent_from || last_tensor != op.tensor)
        shape.shard_bytes += sent_from.volume() * ItemBytes(wanted.spec.dtype);
      last_box = &sent_from;
      last_tensor = op.tensor;
    }
    shapes.push_back(shape);
  }
  return shapes;
}

std::uint64_t WindowNs(const TransportCost& cost, const RouteShape& shape, WindowKind kind) {
  const auto pieces = [&](std::uint64_t bytes) {
    return bytes / cost.window_bytes + (bytes % cost.window_bytes != 0 ? 1 : 0);
  };
  const std::uint64_t wire = NsOf(shape.bytes, cost.bytes_per_us);
  const std::uint64_t pack = NsOf(shape.bytes, cost.pack_bytes_per_us);
  // Packing, moving and unpacking overlap, window by window: only one window of each is not hidden.
  const std::uint64_t fill = NsOf(std::min(shape.bytes, cost.window_bytes), cost.pack_bytes_per_us);
  switch (kind) {
    case WindowKind::kContiguous:
      return wire + Times(pieces(shape.bytes), cost.window_ns) +
             Times(shape.run_count, cost.run_ns);
    case WindowKind::kStrided:
      if (!cost.strided) return kNever;
      return wire + Times(pieces(shape.bytes), cost.window_ns) +
             Times(shape.op_count, cost.descriptor_ns) + Times(shape.run_count, cost.row_ns);
    case WindowKind::kBucket:
      return std::max(wire, pack + Times(shape.run_count, cost.row_ns)) +
             Times(pieces(shape.bytes), cost.window_ns) + 2 * fill;
    case WindowKind::kShard:
      return std::max(NsOf(shape.shard_bytes, cost.bytes_per_us),
                      pack + Times(shape.run_count, cost.row_ns)) +
             Times(pieces(shape.shard_bytes), cost.window_ns) + fill;
  }
  return kNever;
}

WindowKind ChooseWindow(const TransportCost& cost, const RouteShape& shape) {
  WindowKind best = WindowKind::kContiguous;
  for (const WindowKind kind : {WindowKind::kStrided, WindowKind::kBucket, WindowKind::kShard}) {
    if (WindowNs(cost, shape, kind) < WindowNs(cost, shape, best)) best = kind;
  }
  return best;
}

}  // namespace tensorbus::planner
