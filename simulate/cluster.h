#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/plan.h"
#include "tensorbus/base/status.h"

namespace tensorbus::simulate {

/// Most nodes and devices per node that a cluster may have.
inline constexpr std::uint32_t kMaxNodes = 65536;
inline constexpr std::uint32_t kMaxDevicesPerNode = 1024;

/// What a port of one kind can do, each way. A rate of 0 says that there is no such port.
struct PortSpeed {
  double bytes_per_s = 0;
  double message_s = 0;  ///< what each message keeps the port busy beyond its bytes
};

/// The place of a rank.
struct Seat {
  std::uint32_t node = 0;
  std::uint32_t device = 0;

  friend bool operator==(const Seat&, const Seat&) = default;
};

/// Machines and who sits where. A device is a GPU, or a rank's place on a host whose ranks have
/// their tensors in host memory. A plain value; valid when CheckCluster() says so.
struct Cluster {
  std::string name;
  std::uint32_t node_count = 0;
  std::uint32_t devices_per_node = 0;
  bool gpus = true;  ///< else tensors are in host memory
  std::uint32_t nics_per_node = 0;
  std::uint32_t nodes_per_nvlink_domain = 1;
  PortSpeed nic;     ///< of one NIC; a device uses the one with its number, modulo their count
  PortSpeed nvlink;  ///< of one GPU
  PortSpeed pcie;    ///< between one GPU and its NIC, or between GPUs without NVLink
  PortSpeed memory;  ///< of one GPU, or of one host; reading and writing count alike
  std::uint64_t window_bytes = std::uint64_t{16} << 20;
  std::vector<Seat> source_seats;  ///< by rank; empty: from the first node on, device by device
  std::vector<Seat> target_seats;  ///< by rank; empty: from the first node without a source on
};

/// Numbers in range, rates finite and positive where there is a port. Error: kInvalidArgument
/// naming the field.
Status CheckCluster(const Cluster& cluster);

/// Where every rank of a transfer sits.
struct Seating {
  std::vector<Seat> sources;
  std::vector<Seat> targets;
};

/// Seats the ranks. `colocated` puts target rank i where source rank i is. Errors:
/// kFailedPrecondition when the cluster has too few nodes, saying how many are needed;
/// kInvalidArgument when it lists seats for another number of ranks.
Result<Seating> SeatRanks(const Cluster& cluster, std::uint32_t source_count,
                          std::uint32_t target_count, bool colocated);

/// The cluster as the planner sees it: a "node" is an NVLink domain with its targets (by lowest
/// target rank), and ranks on one seat share a device.
planner::Topology TopologyOf(const Cluster& cluster, const Seating& seating);

}  // namespace tensorbus::simulate
