#include "planner/relay_certificate.h"

#include <algorithm>
#include <fmt/format.h>
#include <span>

namespace tensorbus::planner {
namespace {

/// A box that one rank receives, and when.
struct Arrival {
  std::uint32_t box;
  std::uint32_t round;
};

/// What one target rank receives from other devices, by tensor.
class Arrivals {
 public:
  Arrivals(const Plan& plan, std::span<const Route> routes, std::size_t tensor_count)
      : plan_(plan), starts_(tensor_count + 1) {
    const auto for_each = [&](const auto& use) {
      for (const Route& route : routes) {
        if (route.local) continue;
        for (std::uint64_t i = 0; i < route.op_count; ++i)
          use(plan.ops[route.first_op + i], route.round);
      }
    };
    for_each([&](const RouteOp& op, std::uint32_t) { ++starts_[op.tensor + 1]; });
    for (std::size_t t = 0; t < tensor_count; ++t) starts_[t + 1] += starts_[t];
    list_.resize(starts_.back());
    std::vector<std::uint64_t> next(starts_.begin(), starts_.end() - 1);
    for_each([&](const RouteOp& op, std::uint32_t round) {
      list_[next[op.tensor]++] = {op.box, round};
    });
    for (std::size_t t = 0; t < tensor_count; ++t) {
      if (starts_[t + 1] - starts_[t] < 2) continue;
      std::sort(list_.begin() + static_cast<std::ptrdiff_t>(starts_[t]),
                list_.begin() + static_cast<std::ptrdiff_t>(starts_[t + 1]),
                [](const Arrival& a, const Arrival& b) { return a.box < b.box; });
    }
  }

  /// How many elements of the op's box arrive in rounds below `round`.
  std::uint64_t VolumeBefore(const RouteOp& op, std::uint64_t round) const {
    const Box& box = plan_.boxes[op.box];
    const auto arrivals = std::span<const Arrival>(list_).subspan(
        starts_[op.tensor], starts_[op.tensor + 1] - starts_[op.tensor]);
    const auto same =
        std::lower_bound(arrivals.begin(), arrivals.end(), op.box,
                         [](const Arrival& a, std::uint32_t number) { return a.box < number; });
    // Mostly it is passed on as it came.
    if (same != arrivals.end() && same->box == op.box)
      return same->round < round ? box.volume() : 0;
    std::uint64_t volume = 0;
    for (const Arrival& arrival : arrivals) {
      if (arrival.round >= round) continue;
      if (const auto common = Intersect(plan_.boxes[arrival.box], box)) volume += common->volume();
    }
    return volume;
  }

 private:
  const Plan& plan_;
  std::vector<std::uint64_t> starts_;
  std::vector<Arrival> list_;  // by tensor, then box
};

Status Fault(const JobLayout& target, const CopyOp& op, std::uint32_t round, bool later) {
  const char* what = later ? "before all of it has arrived" : "but never receives all of it";
  return {Code::kInternal,
          fmt::format("tensor '{}': target {} passes box {} on to target {} in round {}, {}",
                      target.tensors[op.tensor].spec.name, op.source, op.box.ToString(), op.target,
                      round, what),
          Reason::kPlanMismatch};
}

}  // namespace

Status CheckRelays(const JobLayout& target, const Plan& plan,
                   std::span<const std::uint32_t> ranks) {
  std::vector<std::vector<const Route*>> passed_on(target.rank_count);  // by rank that sends
  std::vector<std::uint64_t> starts(target.rank_count + 1);             // of the routes into a rank
  for (const Route& route : plan.routes) {
    ++starts[route.target + 1];
    if (route.relayed) passed_on[route.source].push_back(&route);
  }
  for (std::uint32_t rank = 0; rank < target.rank_count; ++rank) starts[rank + 1] += starts[rank];
  for (const std::uint32_t rank : ranks) {
    if (passed_on[rank].empty()) continue;
    const auto into = std::span(plan.routes).subspan(starts[rank], starts[rank + 1] - starts[rank]);
    const Arrivals arrivals(plan, into, target.tensors.size());
    for (const Route* route : passed_on[rank]) {
      for (std::size_t i = 0; i < route->op_count; ++i) {
        const RouteOp& op = plan.ops[route->first_op + i];
        const std::uint64_t volume = plan.boxes[op.box].volume();
        if (arrivals.VolumeBefore(op, route->round) == volume) continue;
        const bool later = arrivals.VolumeBefore(op, std::uint64_t{1} << 32) == volume;
        return Fault(target, OpsOf(plan, *route)[i], route->round, later);
      }
    }
  }
  return {};
}

}  // namespace tensorbus::planner
