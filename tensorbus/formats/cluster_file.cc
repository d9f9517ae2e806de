#include "tensorbus/formats/cluster_file.h"

#include <fmt/format.h>

#include "tensorbus/base/malformed.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::formats {
namespace {

constexpr std::string_view kFormat = "tensorbus-cluster-1";

Result<double> AsNumber(const Json& json, const char* key) {
  TB_ASSIGN_OR_RETURN(const Json* value, Field(json, key));
  if (value->is_number()) return value->get<double>();
  return Malformed(fmt::format("field '{}': a number is needed, not {}", key, Describe(*value)));
}

/// {"gb_per_s": 50, "message_us": 5}; a port that is left out is not there.
Result<simulate::PortSpeed> ParsePort(const Json& node, const char* name) {
  simulate::PortSpeed port;
  if (!node.contains(name)) return port;
  const auto parse = [&](const Json& json) -> Status {
    TB_ASSIGN_OR_RETURN(const double rate, AsNumber(json, "gb_per_s"));
    port.bytes_per_s = rate * 1e9;
    if (!json.contains("message_us")) return {};
    TB_ASSIGN_OR_RETURN(const double message, AsNumber(json, "message_us"));
    port.message_s = message * 1e-6;
    return {};
  };
  const Status status = parse(node.at(name));
  if (!status.ok()) return status.Annotate(fmt::format("field '{}'", name));
  return port;
}

Result<std::uint32_t> Count(const Json& json, const char* key) {
  TB_ASSIGN_OR_RETURN(const std::uint64_t count, UintField(json, key, kMaxRanks));
  return static_cast<std::uint32_t>(count);
}

Result<std::vector<simulate::Seat>> ParseSeats(const Json& json, const char* key) {
  std::vector<simulate::Seat> seats;
  if (!json.contains(key)) return seats;
  TB_ASSIGN_OR_RETURN(const Json* list, ArrayField(json, key));
  if (list->size() > kMaxRanks)
    return Malformed(fmt::format("field '{}': more than {} ranks", key, kMaxRanks));
  for (const Json& item : *list) {
    if (!item.is_array() || item.size() != 2) {
      return Malformed(
          fmt::format("field '{}': a pair [node, device] is needed, not {}", key, Describe(item)));
    }
    simulate::Seat seat;
    for (const auto& [number, place] :
         {std::pair{&item[0], &seat.node}, {&item[1], &seat.device}}) {
      TB_ASSIGN_OR_RETURN(const std::uint64_t at,
                          AsUint(*number, fmt::format("field '{}'", key), kMaxRanks));
      *place = static_cast<std::uint32_t>(at);
    }
    seats.push_back(seat);
  }
  return seats;
}

Status ParseNode(const Json& node, simulate::Cluster* cluster) {
  TB_RETURN_IF_ERROR(CheckObject(node, "a node"));
  cluster->gpus = node.contains("gpus");
  TB_ASSIGN_OR_RETURN(cluster->devices_per_node, Count(node, cluster->gpus ? "gpus" : "ranks"));
  TB_ASSIGN_OR_RETURN(cluster->nics_per_node, Count(node, "nics"));
  TB_ASSIGN_OR_RETURN(cluster->nic, ParsePort(node, "nic"));
  TB_ASSIGN_OR_RETURN(cluster->nvlink, ParsePort(node, "nvlink"));
  TB_ASSIGN_OR_RETURN(cluster->pcie, ParsePort(node, "pcie"));
  TB_ASSIGN_OR_RETURN(cluster->memory,
                      ParsePort(node, cluster->gpus ? "gpu_memory" : "host_memory"));
  if (node.contains("nvlink") && node.at("nvlink").contains("nodes")) {
    TB_ASSIGN_OR_RETURN(cluster->nodes_per_nvlink_domain, Count(node.at("nvlink"), "nodes"));
  }
  return {};
}

}  // namespace

Result<simulate::Cluster> ParseCluster(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "a cluster"));
  TB_ASSIGN_OR_RETURN(const std::string format, StringField(json, "format"));
  if (format != kFormat)
    return Malformed(fmt::format("field 'format': '{}', not '{}'", format, kFormat));
  simulate::Cluster cluster;
  TB_ASSIGN_OR_RETURN(cluster.name, StringField(json, "name"));
  TB_ASSIGN_OR_RETURN(cluster.node_count, Count(json, "nodes"));
  TB_ASSIGN_OR_RETURN(const Json* node, Field(json, "node"));
  const Status status = ParseNode(*node, &cluster);
  if (!status.ok()) return status.Annotate("field 'node'");
  if (json.contains("window_bytes")) {
    TB_ASSIGN_OR_RETURN(cluster.window_bytes, UintField(json, "window_bytes", kMaxTensorBytes));
  }
  TB_ASSIGN_OR_RETURN(cluster.source_seats, ParseSeats(json, "source"));
  TB_ASSIGN_OR_RETURN(cluster.target_seats, ParseSeats(json, "target"));
  TB_RETURN_IF_ERROR(simulate::CheckCluster(cluster));
  return cluster;
}

Result<simulate::Cluster> ReadCluster(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  auto cluster = ParseCluster(text);
  if (!cluster.ok()) return cluster.status().Annotate(path);
  return cluster;
}

}  // namespace tensorbus::formats
