#include "planner/certificate_tables.h"

#include <algorithm>
#include <fmt/format.h>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>

namespace tensorbus::planner {
namespace {

/// Where a route stands among the others. Only relayed routes may share all but the round.
auto PlaceOf(const Route& route) {
  return std::tuple(route.target, route.relayed, route.source,
                    route.relayed ? route.round : std::uint32_t{0});
}

class TableCheck {
 public:
  TableCheck(const JobLayout& source, const JobLayout& target, const Topology& topology,
             const Plan& plan)
      : source_(source), target_(target), plan_(plan), same_device_(topology.same_device) {
    std::sort(same_device_.begin(), same_device_.end());
  }

  Result<CheckedTables> Run() && {
    TB_RETURN_IF_ERROR(CheckBoxes());
    TB_RETURN_IF_ERROR(MatchNames());
    TB_RETURN_IF_ERROR(CheckRoutes());
    TB_RETURN_IF_ERROR(CheckRounds());
    return std::move(checked_);
  }

 private:
  /// Boxes ascend, so that their numbers order them and equal boxes have one number.
  Status CheckBoxes() {
    const Box* previous = nullptr;
    for (const Box& box : plan_.boxes) {
      if (box.empty()) return CertificateFault(fmt::format("box {} is empty", box.ToString()));
      if (previous != nullptr && *previous >= box)
        return CertificateFault(fmt::format("box {} is out of order or repeated", box.ToString()));
      checked_.volumes.push_back(box.volume());
      previous = &box;
    }
    return {};
  }

  /// Both sides mostly name tensors in one order, so the next few names of the source are tried
  /// before a map of all of them is made.
  Status MatchNames() {
    constexpr std::size_t kAhead = 8;
    const std::vector<JobLayout::Tensor>& held = source_.tensors;
    std::unordered_map<std::string_view, std::size_t> by_name;
    std::size_t next = 0;
    checked_.matches.reserve(target_.tensors.size());
    for (const JobLayout::Tensor& tensor : target_.tensors) {
      const std::size_t end = std::min(held.size(), next + kAhead);
      while (next < end && held[next].spec.name != tensor.spec.name) ++next;
      if (next == end) {
        if (by_name.empty()) {
          for (std::size_t i = 0; i < held.size(); ++i) by_name.emplace(held[i].spec.name, i);
        }
        const auto found = by_name.find(tensor.spec.name);
        if (found == by_name.end()) return TensorFault(tensor.spec, "unknown to the source");
        next = found->second;
      }
      const TensorSpec& spec = held[next].spec;
      if (spec.dtype != tensor.spec.dtype || spec.shape != tensor.spec.shape)
        return TensorFault(tensor.spec, "shapes or dtypes differ");
      checked_.matches.push_back({held[next].holding, ItemBytes(spec.dtype)});
      ++next;
    }
    return {};
  }

  static Status TensorFault(const TensorSpec& spec, std::string_view what) {
    return CertificateFault(fmt::format("tensor '{}': {}", spec.name, what));
  }

  /// Routes and their ops are in range and in their fixed order, and a route says what its ops do.
  Status CheckRoutes() const {
    std::uint64_t next = 0;
    const Route* previous = nullptr;
    for (const Route& route : plan_.routes) {
      const std::uint32_t senders = route.relayed ? target_.rank_count : source_.rank_count;
      if (route.source >= senders || route.target >= target_.rank_count)
        return CertificateFault(DescribeRoute(route) + ": no such rank");
      if (previous != nullptr && PlaceOf(*previous) >= PlaceOf(route))
        return CertificateFault(DescribeRoute(route) + ": out of order or repeated");
      if (route.first_op != next || route.op_count == 0 ||
          route.op_count > plan_.ops.size() - next) {
        return CertificateFault(DescribeRoute(route) +
                                ": its ops do not follow those of the route before it");
      }
      TB_RETURN_IF_ERROR(CheckDevice(route));
      TB_RETURN_IF_ERROR(CheckOps(route));
      next += route.op_count;
      previous = &route;
    }
    return next == plan_.ops.size() ? Status() : CertificateFault("ops that belong to no route");
  }

  Status CheckDevice(const Route& route) const {
    if (route.relayed && route.local)
      return CertificateFault(DescribeRoute(route) + ": called local, but it is passed on");
    const bool one_device =
        !route.relayed && std::binary_search(same_device_.begin(), same_device_.end(),
                                             std::pair(route.source, route.target));
    if (route.local == one_device) return {};
    return CertificateFault(fmt::format("{}: {}", DescribeRoute(route),
                                        route.local
                                            ? "called local, but the ranks are on two devices"
                                            : "sent, but both ranks are on one device"));
  }

  Status OpFault(const Route& route, const RouteOp& op, std::string_view what) const {
    return CertificateFault(fmt::format("{}: {}", DescribeOp(target_, plan_, route, op), what));
  }

  Status CheckOps(const Route& route) const {
    const std::span<const CheckedTables::Match> matches = checked_.matches;
    const std::span<const std::uint64_t> volumes = checked_.volumes;
    std::uint64_t bytes = 0;
    std::uint64_t least = 0;  // that may come next, tensor and box as one number
    for (const RouteOp& op : std::span(plan_.ops).subspan(route.first_op, route.op_count)) {
      if (op.tensor >= matches.size()) return OpFault(route, op, "no such tensor");
      if (op.box >= volumes.size()) return OpFault(route, op, "no such box");
      const std::uint64_t place = std::uint64_t{op.tensor} << 32 | op.box;
      if (place < least) return OpFault(route, op, "out of order or repeated");
      bytes += volumes[op.box] * matches[op.tensor].item_bytes;
      least = place + 1;
    }
    if (bytes == route.bytes) return {};
    return CertificateFault(
        fmt::format("{}: {} bytes, its ops have {}", DescribeRoute(route), route.bytes, bytes));
  }

  /// No rank is asked to do two things in a round.
  Status CheckRounds() const {
    using Turn = std::tuple<std::uint64_t, std::uint32_t, const Route*>;  // rank and round
    std::vector<Turn> sending;
    std::vector<Turn> receiving;
    for (const Route& route : plan_.routes) {
      if (route.local) continue;
      if (route.round >= plan_.round_count) return RoundFault(route);
      // Sources and targets that pass bytes on are different ranks.
      const std::uint64_t sender = std::uint64_t{route.relayed} << 32 | route.source;
      sending.emplace_back(sender, route.round, &route);
      receiving.emplace_back(route.target, route.round, &route);
    }
    for (std::vector<Turn>* turns : {&sending, &receiving}) {
      std::sort(turns->begin(), turns->end());
      for (std::size_t i = 1; i < turns->size(); ++i) {
        const auto& [rank, round, route] = (*turns)[i];
        if (std::get<0>((*turns)[i - 1]) == rank && std::get<1>((*turns)[i - 1]) == round)
          return RoundFault(*route);
      }
    }
    return {};
  }
  Status RoundFault(const Route& route) const {
    return CertificateFault(fmt::format("{}: round {} of {} is taken", DescribeRoute(route),
                                        route.round, plan_.round_count));
  }

  const JobLayout& source_;
  const JobLayout& target_;
  const Plan& plan_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> same_device_;  // ascending
  CheckedTables checked_;
};

}  // namespace

Result<CheckedTables> CheckTables(const JobLayout& source, const JobLayout& target,
                                  const Topology& topology, const Plan& plan) {
  return TableCheck(source, target, topology, plan).Run();
}

Status CertificateFault(std::string message) {
  return {Code::kInternal, std::move(message), Reason::kPlanMismatch};
}

std::string DescribeRoute(const Route& route) {
  return fmt::format("route from {} {} to target {}", route.relayed ? "target" : "source",
                     route.source, route.target);
}

std::string DescribeOp(const JobLayout& target, const Plan& plan, const Route& route,
                       const RouteOp& op) {
  const std::string name = op.tensor < target.tensors.size()
                               ? fmt::format("'{}'", target.tensors[op.tensor].spec.name)
                               : fmt::format("number {}", op.tensor);
  const std::string box =
      op.box < plan.boxes.size() ? plan.boxes[op.box].ToString() : fmt::format("number {}", op.box);
  return fmt::format("tensor {}: op from {} {} to target {}, box {}", name,
                     route.relayed ? "target" : "source", route.source, route.target, box);
}

}  // namespace tensorbus::planner
