#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <set>

#include "planner/balance.h"
#include "planner/class_plan.h"
#include "planner/regions.h"
#include "planner/survivors.h"
#include "planner/topology.h"

namespace tensorbus::planner {
namespace {

/// Bytes that at least one target that is left needs.
Result<std::uint64_t> UniqueBytes(const JobLayout& target, const RankSelection& lost) {
  std::vector<std::uint64_t> volumes;
  for (Holding holding : target.holdings) {
    std::erase_if(holding.ranks, [&](const RankBoxes& held) {
      return std::binary_search(lost.targets.begin(), lost.targets.end(), held.rank);
    });
    TB_ASSIGN_OR_RETURN(const std::vector<Region> regions, RegionsOf(holding));
    std::uint64_t volume = 0;
    for (const Region& region : regions) volume += region.box.volume();
    volumes.push_back(volume);
  }
  std::uint64_t bytes = 0;
  for (const JobLayout::Tensor& tensor : target.tensors)
    bytes += volumes[tensor.holding] * ItemBytes(tensor.spec.dtype);
  return bytes;
}

/// Everything that sources must send, by holders, whatever the nodes: what the bound of the busiest
/// source is computed from. With relays each byte counts once, else once for each target.
Result<std::vector<Supply>> SuppliesOf(const LayoutMatch& match, const TopologyIndex& places,
                                       const PlanOptions& options) {
  TB_ASSIGN_OR_RETURN(Survivors survivors, Survivors::Create(match, options.lost));
  std::vector<std::uint64_t> bytes(match.rank_sets.size());
  for (std::size_t c = 0; c < match.classes.size(); ++c) {
    const TensorClass& tensor_class = match.classes[c];
    const std::uint64_t scale = ItemBytes(tensor_class.dtype) * tensor_class.tensors.size();
    for (const Cell& cell : match.cells[c]) {
      const std::vector<std::uint32_t>& targets = survivors.TargetsOf(cell.targets);
      std::uint64_t remote = targets.size();
      if (!places.trivial()) {
        for (const std::uint32_t t : targets)
          remote -= places.LocalHolder(survivors.SourcesOf(cell.holders), t) ? 1 : 0;
      }
      if (options.relays) remote = std::min<std::uint64_t>(remote, 1);
      bytes[cell.holders] += match.boxes[cell.box].volume() * scale * remote;
    }
  }
  std::vector<Supply> supplies;
  for (std::uint32_t set = 0; set < bytes.size(); ++set) {
    if (bytes[set] != 0) supplies.push_back({survivors.SourcesOf(set), bytes[set]});
  }
  return supplies;
}

/// By rank, the node it is on; each rank in none gets a number of its own after them.
std::vector<std::size_t> NodesOf(const Topology& topology, std::uint32_t count,
                                 std::vector<std::uint32_t> Topology::Node::*side) {
  std::vector<std::size_t> nodes(count);
  for (std::uint32_t rank = 0; rank < count; ++rank) nodes[rank] = topology.nodes.size() + rank;
  for (std::size_t n = 0; n < topology.nodes.size(); ++n) {
    for (const std::uint32_t rank : topology.nodes[n].*side) nodes[rank] = n;
  }
  return nodes;
}

std::uint64_t MaxOf(const std::vector<std::uint64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

/// Bytes that go from node to node, by rank.
struct PortLoads {
  std::vector<std::uint64_t> out_of_sources;
  std::vector<std::uint64_t> out_of_targets;
  std::vector<std::uint64_t> in;  ///< by target
};

/// The most that one device sends: its source ranks first-hand, its target ranks passing on.
std::uint64_t BusiestDevice(const Topology& topology, std::vector<std::uint64_t> by_source,
                            const std::vector<std::uint64_t>& by_target) {
  const std::set<std::pair<std::uint32_t, std::uint32_t>> shared(topology.same_device.begin(),
                                                                 topology.same_device.end());
  for (const auto& [source, target] : shared) by_source[source] += by_target[target];
  return std::max(MaxOf(by_source), MaxOf(by_target));
}

/// Whether `a` is less than `b` by more than a 64th of it.
bool ClearlyLess(std::uint64_t a, std::uint64_t b) {
  return a < b && b - a > b / 64;
}

std::uint64_t BusiestOf(const PlanFigures& figures) {
  return std::max(figures.max_send_bytes, MaxOf(figures.recv_bytes));
}

}  // namespace

RelayVerdict WeighRelays(const PlanFigures& direct, const PlanFigures& relayed) {
  const std::uint64_t busiest = BusiestOf(direct);
  const std::uint64_t busiest_relayed = BusiestOf(relayed);
  const std::string numbers = fmt::format(
      "the busiest device moves {} bytes without relays and {} with them, the busiest port between "
      "nodes {} and {}",
      busiest, busiest_relayed, direct.max_port_bytes, relayed.max_port_bytes);
  const bool lower = ClearlyLess(busiest_relayed, busiest) ||
                     ClearlyLess(relayed.max_port_bytes, direct.max_port_bytes);
  const bool higher = ClearlyLess(busiest, busiest_relayed) ||
                      ClearlyLess(direct.max_port_bytes, relayed.max_port_bytes);
  return {lower && !higher, numbers};
}

Result<PlanFigures> FiguresOf(const JobLayout& source, const JobLayout& target,
                              const Topology& topology, const Plan& plan) {
  TB_ASSIGN_OR_RETURN(const TopologyIndex places,
                      TopologyIndex::Create(topology, source.rank_count, target.rank_count));
  TB_ASSIGN_OR_RETURN(const LayoutMatch match, MatchLayouts(source, target, plan.options, nullptr));
  TB_ASSIGN_OR_RETURN(const std::vector<Supply> supplies, SuppliesOf(match, places, plan.options));
  PlanFigures figures;
  TB_ASSIGN_OR_RETURN(figures.unique_bytes, UniqueBytes(target, plan.options.lost));
  figures.recv_bytes.assign(target.rank_count, 0);
  figures.local_bytes.assign(target.rank_count, 0);
  figures.relay_bytes.assign(target.rank_count, 0);
  figures.send_bytes.assign(source.rank_count, 0);
  figures.node_in_bytes.assign(topology.nodes.size(), 0);
  const auto source_node = NodesOf(topology, source.rank_count, &Topology::Node::source);
  const auto target_node = NodesOf(topology, target.rank_count, &Topology::Node::target);
  std::vector<std::uint64_t> heaviest(plan.round_count);  // by round
  PortLoads ports{std::vector<std::uint64_t>(source.rank_count),
                  std::vector<std::uint64_t>(target.rank_count),
                  std::vector<std::uint64_t>(target.rank_count)};
  for (const Route& route : plan.routes) {
    if (route.local) {
      figures.local_bytes[route.target] += route.bytes;
      continue;
    }
    heaviest[route.round] = std::max(heaviest[route.round], route.bytes);
    figures.recv_bytes[route.target] += route.bytes;
    (route.relayed ? figures.relay_bytes : figures.send_bytes)[route.source] += route.bytes;
    const std::size_t node = target_node[route.target];
    const bool from_inside = node < topology.nodes.size() &&
                             (route.relayed ? target_node : source_node)[route.source] == node;
    if (node < topology.nodes.size() && !from_inside) figures.node_in_bytes[node] += route.bytes;
    if (from_inside) continue;
    ports.in[route.target] += route.bytes;
    (route.relayed ? ports.out_of_targets : ports.out_of_sources)[route.source] += route.bytes;
  }
  for (const std::uint64_t bytes : heaviest) figures.schedule_bytes += bytes;
  figures.max_send_bytes = BusiestDevice(topology, figures.send_bytes, figures.relay_bytes);
  figures.max_port_bytes = std::max(
      BusiestDevice(topology, ports.out_of_sources, ports.out_of_targets), MaxOf(ports.in));
  figures.lower_bound_bytes =
      std::max(MaxOf(figures.recv_bytes), MinMaxSend(supplies, source.rank_count));
  figures.class_count = plan.class_count;
  figures.route_count = plan.routes.size();
  figures.op_count = plan.ops.size();
  figures.round_count = plan.round_count;
  return figures;
}

}  // namespace tensorbus::planner
