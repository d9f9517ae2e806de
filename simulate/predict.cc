#include "simulate/predict.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <map>

#include "simulate/network.h"

namespace tensorbus::simulate {
namespace {

using planner::Route;

double MaxOf(const std::vector<std::uint64_t>& values) {
  return values.empty() ? 0.0
                        : static_cast<double>(*std::max_element(values.begin(), values.end()));
}

/// Turns the routes of a plan into flows.
class Builder {
 public:
  Builder(const Seating& seating, const Move& move, Network* network)
      : seating_(seating), move_(move), network_(*network) {}

  /// In order of rounds, so that what feeds a relay stands before it.
  std::vector<Flow> Run(double window_bytes) {
    const std::vector<Route>& routes = move_.plan.routes;
    order_.resize(routes.size());
    for (std::uint32_t r = 0; r < order_.size(); ++r) order_[r] = r;
    std::stable_sort(order_.begin(), order_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::tuple(!routes[a].local, routes[a].round) <
             std::tuple(!routes[b].local, routes[b].round);
    });
    std::vector<Flow> flows;
    for (const std::uint32_t r : order_) {
      const Route& route = routes[r];
      Flow flow;
      flow.bytes = WireBytes(route);
      flow.window_bytes = window_bytes;
      flow.hops = network_.Route(SenderSeat(route), seating_.targets[route.target], route.local,
                                 flow.bytes);
      flow.sender = route.relayed
                        ? static_cast<std::uint32_t>(seating_.sources.size()) + route.source
                        : route.source;
      flow.receiver = route.target;
      flow.round = route.round;
      flows.push_back(std::move(flow));
    }
    AddFeeds(&flows);
    return flows;
  }

  const Route& RouteOf(std::uint32_t flow) const { return move_.plan.routes[order_[flow]]; }
  const Seat& SenderSeat(const Route& route) const {
    return (route.relayed ? seating_.targets : seating_.sources)[route.source];
  }

 private:
  std::span<const planner::RouteOp> StoredOpsOf(const Route& route) const {
    return std::span(move_.plan.ops).subspan(route.first_op, route.op_count);
  }

  double WireBytes(const Route& route) const {
    std::uint64_t bytes = route.bytes;
    if (move_.quantised.empty()) return static_cast<double>(bytes);
    for (const planner::RouteOp& op : StoredOpsOf(route)) {
      if (move_.quantised[op.tensor]) bytes += ScaleBytes(move_.plan.boxes[op.box]);
    }
    return static_cast<double>(bytes);
  }

  /// An op that brought bytes to a target, by tensor.
  struct Arrival {
    std::uint32_t tensor;
    std::uint32_t flow;
    std::uint32_t box;  // index into Plan::boxes
  };

  /// What each relayed flow passes on, by the flows that bring it.
  void AddFeeds(std::vector<Flow>* flows) const {
    std::map<std::uint32_t, std::vector<std::uint32_t>> relays;  // by the target that passes on
    std::map<std::uint32_t, std::vector<std::uint32_t>> into;    // flows by target
    for (std::uint32_t f = 0; f < flows->size(); ++f) {
      const Route& route = RouteOf(f);
      if (route.relayed) relays[route.source].push_back(f);
      into[route.target].push_back(f);
    }
    for (const auto& [target, passing] : relays) {
      std::vector<Arrival> arrivals;
      for (const std::uint32_t f : into[target]) {
        for (const planner::RouteOp& op : StoredOpsOf(RouteOf(f)))
          arrivals.push_back({op.tensor, f, op.box});
      }
      std::stable_sort(arrivals.begin(), arrivals.end(),
                       [](const Arrival& a, const Arrival& b) { return a.tensor < b.tensor; });
      for (const std::uint32_t f : passing) AddFeedsOf(f, arrivals, flows);
    }
  }

  void AddFeedsOf(std::uint32_t f, const std::vector<Arrival>& arrivals,
                  std::vector<Flow>* flows) const {
    std::map<std::uint32_t, double> shares;
    double sum = 0;
    for (const planner::RouteOp& op : StoredOpsOf(RouteOf(f))) {
      auto at = std::lower_bound(
          arrivals.begin(), arrivals.end(), op.tensor,
          [](const Arrival& arrival, std::uint32_t tensor) { return arrival.tensor < tensor; });
      for (; at != arrivals.end() && at->tensor == op.tensor; ++at) {
        if (at->flow >= f) continue;
        const auto common = Intersect(move_.plan.boxes[op.box], move_.plan.boxes[at->box]);
        if (!common) continue;
        const double bytes = static_cast<double>(
            common->volume() * ItemBytes(move_.target.tensors[op.tensor].spec.dtype));
        shares[at->flow] += bytes;
        sum += bytes;
      }
    }
    Flow& flow = (*flows)[f];
    // Scales travel with the values they belong to.
    for (const auto& [feeder, bytes] : shares)
      flow.feeds.push_back({feeder, bytes / sum * flow.bytes});
  }

  const Seating& seating_;
  const Move& move_;
  Network& network_;
  std::vector<std::uint32_t> order_;  // by flow: its route
};

class Predictor {
 public:
  Predictor(const Cluster& cluster, const Seating& seating, const Move& move,
            const PredictOptions& options)
      : cluster_(cluster),
        move_(move),
        options_(options),
        network_(cluster),
        builder_(seating, move, &network_),
        seating_(seating) {}

  Result<Prediction> Run() {
    flows_ = builder_.Run(static_cast<double>(cluster_.window_bytes));
    const std::vector<std::uint32_t> groups = network_.Groups();
    FlowOptions options;
    options.sharing = options_.sharing;
    options.groups = groups;
    TB_ASSIGN_OR_RETURN(outcome_, RunFlows(flows_, network_.capacities(), options));
    Prediction made;
    made.seconds = outcome_.end_s;
    AddLinks(&made);
    AddTimelines(&made);
    AddBounds(&made);
    AddCriticalPath(&made);
    return made;
  }

 private:
  void AddLinks(Prediction* made) {
    load_s_.assign(network_.size(), 0);
    std::vector<double> bytes(network_.size());
    for (const Flow& flow : flows_) {
      for (const Hop& hop : flow.hops) {
        load_s_[hop.link] += flow.bytes * hop.cost / network_.capacities()[hop.link];
        bytes[hop.link] += flow.bytes;
      }
    }
    for (std::size_t k = 0; k < kLinkNames.size(); ++k) {
      LinkKind kind;
      kind.name = kLinkNames[k];
      for (std::uint32_t l = 0; l < network_.size(); ++l) {
        if (static_cast<std::size_t>(network_.type(l)) != k) continue;
        ++kind.count;
        kind.capacity += network_.capacities()[l];
        kind.bytes += bytes[l];
        if (load_s_[l] <= kind.busiest_s) continue;
        kind.busiest_s = load_s_[l];
        kind.busiest = network_.NameOf(l);
      }
      if (kind.busiest_s > made->busiest_s) {
        made->busiest_s = kind.busiest_s;
        made->busiest = kind.busiest;
      }
      if (kind.count != 0) {
        kinds_.push_back(k);
        made->kinds.push_back(std::move(kind));
      }
    }
  }

  void AddTimelines(Prediction* made) const {
    if (outcome_.end_s <= 0 || options_.slices == 0) return;
    const double slice_s = outcome_.end_s / static_cast<double>(options_.slices);
    for (std::size_t i = 0; i < kinds_.size(); ++i) {
      LinkKind& kind = made->kinds[i];
      kind.timeline.assign(options_.slices, 0);
      for (const Stretch& stretch : outcome_.stretches) {
        const double share = stretch.used[kinds_[i]] / kind.capacity;
        auto at = static_cast<std::size_t>(stretch.begin_s / slice_s);
        for (; at < options_.slices && static_cast<double>(at) * slice_s < stretch.end_s; ++at) {
          const double from = std::max(stretch.begin_s, static_cast<double>(at) * slice_s);
          const double to = std::min(stretch.end_s, static_cast<double>(at + 1) * slice_s);
          if (to > from) kind.timeline[at] += share * (to - from) / slice_s;
        }
      }
    }
  }

  /// A NIC, or the bus before it where that is slower.
  double NicSpeed() const {
    const bool bus = cluster_.gpus && cluster_.pcie.bytes_per_s > 0;
    return bus ? std::min(cluster_.nic.bytes_per_s, cluster_.pcie.bytes_per_s)
               : cluster_.nic.bytes_per_s;
  }
  double InsideSpeed() const {
    if (!cluster_.gpus) return cluster_.memory.bytes_per_s / 2;
    return cluster_.nvlink.bytes_per_s > 0 ? cluster_.nvlink.bytes_per_s
                                           : cluster_.pcie.bytes_per_s;
  }

  /// Whether routes stay inside domains, and whether they go between them.
  struct Reach {
    bool inside = false;
    bool between = false;
    bool relayed = false;
  };
  Reach ReachOfRoutes() const {
    Reach reach;
    for (std::uint32_t f = 0; f < flows_.size(); ++f) {
      const Route& route = builder_.RouteOf(f);
      if (route.local) continue;
      const bool inside =
          network_.InOneDomain(builder_.SenderSeat(route), seating_.targets[route.target]);
      (inside ? reach.inside : reach.between) = true;
      reach.relayed = reach.relayed || route.relayed;
    }
    return reach;
  }

  void AddBounds(Prediction* made) const {
    const Reach reach = ReachOfRoutes();
    std::vector<Bound>& bounds = made->bounds;
    if (!reach.relayed) AddReceiveBound(&bounds);
    AddRankBound(reach, &bounds);
    const std::uint32_t rails = cluster_.nics_per_node * cluster_.nodes_per_nvlink_domain;
    const double node_in = MaxOf(move_.figures.node_in_bytes);
    if (node_in > 0) {
      bounds.push_back(
          {"node_in", node_in / (NicSpeed() * rails),
           fmt::format("{:.3f} GB enter the busiest node through {} rails of {:.0f} GB/s",
                       node_in * 1e-9, rails, NicSpeed() * 1e-9)});
    }
    std::stable_sort(bounds.begin(), bounds.end(),
                     [](const Bound& a, const Bound& b) { return a.seconds > b.seconds; });
    bounds.push_back({"plan", made->busiest_s,
                      fmt::format("{} is the busiest link of this plan", made->busiest)});
    for (const Flow& flow : flows_) {
      if (flow.hops.size() > 1) made->wire_bytes += flow.bytes;
    }
  }

  /// Without relays what a rank needs comes to it directly: through its NIC unless a holder is in
  /// its domain, and a plan takes such a holder.
  void AddReceiveBound(std::vector<Bound>* bounds) const {
    std::vector<double> load_s(network_.size());
    for (std::uint32_t f = 0; f < flows_.size(); ++f) {
      const Seat& to = seating_.targets[builder_.RouteOf(f).target];
      for (const Hop& hop : flows_[f].hops) {
        const LinkType type = network_.type(hop.link);
        const bool out =
            type == LinkType::kNicOut || type == LinkType::kNvlinkOut || type == LinkType::kPcieOut;
        if (out || network_.node(hop.link) != to.node) continue;
        load_s[hop.link] += flows_[f].bytes * network_.Touches(hop.link, flows_[f].hops.size()) /
                            network_.capacities()[hop.link];
      }
    }
    const auto busiest = std::max_element(load_s.begin(), load_s.end());
    if (busiest == load_s.end() || *busiest <= 0) return;
    const auto link = static_cast<std::uint32_t>(busiest - load_s.begin());
    bounds->push_back(
        {"receive", *busiest,
         fmt::format("what is needed there comes through {}", network_.NameOf(link))});
  }

  /// Ranks of a host share its NICs, so this is for GPUs, which have ports of their own.
  void AddRankBound(const Reach& reach, std::vector<Bound>* bounds) const {
    if (!cluster_.gpus || (!reach.inside && !reach.between)) return;
    auto bytes = static_cast<double>(move_.figures.lower_bound_bytes);
    double port = (reach.between ? NicSpeed() : 0) + (reach.inside ? InsideSpeed() : 0);
    const auto far_bytes = static_cast<double>(move_.far_bytes);
    if (far_bytes / NicSpeed() > bytes / port) {
      bytes = far_bytes;
      port = NicSpeed();
    }
    bounds->push_back({"rank", bytes / port,
                       fmt::format("the busiest rank moves {:.3f} GB through ports of {:.0f} GB/s",
                                   bytes * 1e-9, port * 1e-9)});
  }

  void AddCriticalPath(Prediction* made) const {
    if (flows_.empty()) return;
    std::uint32_t f = 0;
    for (std::uint32_t i = 0; i < flows_.size(); ++i) {
      if (outcome_.times[i].end_s > outcome_.times[f].end_s) f = i;
    }
    while (true) {
      const Route& route = builder_.RouteOf(f);
      const FlowTimes& times = outcome_.times[f];
      made->critical_path.push_back(
          {fmt::format("{} {}", route.relayed ? "target" : "source", route.source),
           fmt::format("target {}", route.target), times.start_s, times.end_s, flows_[f].bytes,
           times.link == kNoLink ? "what feeds it" : network_.NameOf(times.link)});
      if (flows_[f].feeds.empty()) break;
      f = std::max_element(flows_[f].feeds.begin(), flows_[f].feeds.end(),
                           [&](const Feed& a, const Feed& b) {
                             return outcome_.times[a.flow].end_s < outcome_.times[b.flow].end_s;
                           })
              ->flow;
    }
    std::reverse(made->critical_path.begin(), made->critical_path.end());
  }

  const Cluster& cluster_;
  const Move& move_;
  const PredictOptions& options_;
  Network network_;
  Builder builder_;
  const Seating& seating_;
  std::vector<Flow> flows_;
  FlowOutcome outcome_;
  std::vector<double> load_s_;      // by link
  std::vector<std::size_t> kinds_;  // types of the kinds reported
};

}  // namespace

Result<Prediction> Predict(const Cluster& cluster, const Seating& seating, const Move& move,
                           const PredictOptions& options) {
  return Predictor(cluster, seating, move, options).Run();
}

}  // namespace tensorbus::simulate
