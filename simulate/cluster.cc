#include "simulate/cluster.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <map>

#include "tensorbus/base/malformed.h"

namespace tensorbus::simulate {
namespace {

constexpr double kMaxRate = 1e15;
constexpr double kMaxMessage = 1.0;

Status CheckPort(const PortSpeed& port, const char* name) {
  const bool rate =
      std::isfinite(port.bytes_per_s) && port.bytes_per_s >= 0 && port.bytes_per_s <= kMaxRate;
  const bool message =
      std::isfinite(port.message_s) && port.message_s >= 0 && port.message_s <= kMaxMessage;
  if (rate && message) return {};
  return Malformed(fmt::format("'{}': {} bytes/s and {} s a message are not possible", name,
                               port.bytes_per_s, port.message_s));
}

Status CheckSeats(const Cluster& cluster, const std::vector<Seat>& seats, const char* side) {
  for (std::size_t rank = 0; rank < seats.size(); ++rank) {
    const Seat& seat = seats[rank];
    if (seat.node >= cluster.node_count || seat.device >= cluster.devices_per_node) {
      return Malformed(
          fmt::format("'{}': rank {} sits at [{}, {}]; there are {} nodes of {} devices", side,
                      rank, seat.node, seat.device, cluster.node_count, cluster.devices_per_node));
    }
  }
  return {};
}

Status CheckCount(std::size_t seats, std::uint32_t ranks, const char* side) {
  if (seats == ranks) return {};
  return {Code::kInvalidArgument,
          fmt::format("the cluster seats {} {} ranks, the transfer has {}", seats, side, ranks),
          Reason::kLayoutMismatch};
}

std::uint32_t DomainOf(const Cluster& cluster, const Seat& seat) {
  return seat.node / cluster.nodes_per_nvlink_domain;
}

}  // namespace

Status CheckCluster(const Cluster& c) {
  if (c.node_count < 1 || c.node_count > kMaxNodes)
    return Malformed(fmt::format("'nodes': {}; from 1 to {}", c.node_count, kMaxNodes));
  if (c.devices_per_node < 1 || c.devices_per_node > kMaxDevicesPerNode) {
    return Malformed(
        fmt::format("'gpus' or 'ranks': {}; from 1 to {}", c.devices_per_node, kMaxDevicesPerNode));
  }
  if (c.nics_per_node < 1 || c.nics_per_node > kMaxDevicesPerNode)
    return Malformed(fmt::format("'nics': {}; from 1 to {}", c.nics_per_node, kMaxDevicesPerNode));
  if (c.nodes_per_nvlink_domain < 1 || c.nodes_per_nvlink_domain > c.node_count) {
    return Malformed(fmt::format("'nvlink': a domain of {} nodes; from 1 to {}",
                                 c.nodes_per_nvlink_domain, c.node_count));
  }
  TB_RETURN_IF_ERROR(CheckPort(c.nic, "nic"));
  TB_RETURN_IF_ERROR(CheckPort(c.nvlink, "nvlink"));
  TB_RETURN_IF_ERROR(CheckPort(c.pcie, "pcie"));
  TB_RETURN_IF_ERROR(CheckPort(c.memory, "memory"));
  if (c.nic.bytes_per_s == 0) return Malformed("'nic': a rate is needed");
  if (c.memory.bytes_per_s == 0)
    return Malformed("'gpu_memory' or 'host_memory': a rate is needed");
  if (c.gpus && c.nvlink.bytes_per_s == 0 && c.pcie.bytes_per_s == 0)
    return Malformed("'nvlink' or 'pcie': GPUs of a node need one of them");
  if (c.window_bytes < 4096 || c.window_bytes > std::uint64_t{1} << 40)
    return Malformed(fmt::format("'window_bytes': {}; from 4096 to 2^40", c.window_bytes));
  TB_RETURN_IF_ERROR(CheckSeats(c, c.source_seats, "source"));
  return CheckSeats(c, c.target_seats, "target");
}

Result<Seating> SeatRanks(const Cluster& cluster, std::uint32_t source_count,
                          std::uint32_t target_count, bool colocated) {
  const std::uint32_t devices = cluster.devices_per_node;
  Seating seating;
  std::uint32_t free_node = 0;
  const auto fill = [&](std::uint32_t count) {
    std::vector<Seat> seats;
    for (std::uint32_t rank = 0; rank < count; ++rank)
      seats.push_back({free_node + rank / devices, rank % devices});
    return seats;
  };
  seating.sources = cluster.source_seats.empty() ? fill(source_count) : cluster.source_seats;
  TB_RETURN_IF_ERROR(CheckCount(seating.sources.size(), source_count, "source"));
  for (const Seat& seat : seating.sources) free_node = std::max(free_node, seat.node + 1);
  if (colocated) free_node = 0;
  seating.targets = cluster.target_seats.empty() ? fill(target_count) : cluster.target_seats;
  TB_RETURN_IF_ERROR(CheckCount(seating.targets.size(), target_count, "target"));
  std::uint32_t needed = 0;
  for (const auto* seats : {&seating.sources, &seating.targets}) {
    for (const Seat& seat : *seats) needed = std::max(needed, seat.node + 1);
  }
  if (needed > cluster.node_count) {
    return Status(
        Code::kFailedPrecondition,
        fmt::format("{} source and {} target ranks need {} nodes of {} devices; cluster "
                    "'{}' has {}",
                    source_count, target_count, needed, devices, cluster.name, cluster.node_count),
        Reason::kLayoutMismatch);
  }
  return seating;
}

planner::Topology TopologyOf(const Cluster& cluster, const Seating& seating) {
  planner::Topology topology;
  std::map<std::uint32_t, std::size_t> node_of_domain;
  for (std::uint32_t t = 0; t < seating.targets.size(); ++t) {
    const auto [at, fresh] =
        node_of_domain.emplace(DomainOf(cluster, seating.targets[t]), topology.nodes.size());
    if (fresh) topology.nodes.emplace_back();
    topology.nodes[at->second].target.push_back(t);
  }
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::uint32_t>> sources_at;
  for (std::uint32_t s = 0; s < seating.sources.size(); ++s) {
    const Seat& seat = seating.sources[s];
    const auto at = node_of_domain.find(DomainOf(cluster, seat));
    if (at != node_of_domain.end()) topology.nodes[at->second].source.push_back(s);
    sources_at[{seat.node, seat.device}].push_back(s);
  }
  for (std::uint32_t t = 0; t < seating.targets.size(); ++t) {
    const Seat& seat = seating.targets[t];
    const auto at = sources_at.find({seat.node, seat.device});
    if (at == sources_at.end()) continue;
    for (const std::uint32_t s : at->second) topology.same_device.emplace_back(s, t);
  }
  return topology;
}

}  // namespace tensorbus::simulate
