#include "tensorbus/formats/topology_file.h"

#include <fmt/format.h>

#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::formats {
namespace {

Result<std::vector<std::uint32_t>> ParseRanks(const Json& object, const char* key) {
  std::vector<std::uint32_t> ranks;
  if (!object.contains(key)) return ranks;
  TB_ASSIGN_OR_RETURN(const Json* list, ArrayField(object, key));
  for (const Json& item : *list) {
    TB_ASSIGN_OR_RETURN(const std::uint64_t rank, AsUint(item, key, kMaxRanks));
    ranks.push_back(static_cast<std::uint32_t>(rank));
  }
  return ranks;
}

Result<planner::Topology::Node> ParseNode(const Json& json) {
  TB_RETURN_IF_ERROR(CheckObject(json, "a node"));
  planner::Topology::Node node;
  TB_ASSIGN_OR_RETURN(node.source, ParseRanks(json, "source"));
  TB_ASSIGN_OR_RETURN(node.target, ParseRanks(json, "target"));
  return node;
}

}  // namespace

Result<planner::Topology> ParseTopology(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "a topology"));
  planner::Topology topology;
  if (json.contains("nodes")) {
    TB_ASSIGN_OR_RETURN(const Json* nodes, ArrayField(json, "nodes"));
    for (std::size_t n = 0; n < nodes->size(); ++n) {
      auto node = ParseNode((*nodes)[n]);
      if (!node.ok()) return node.status().Annotate(fmt::format("field 'nodes': node {}", n));
      topology.nodes.push_back(std::move(*node));
    }
  }
  if (!json.contains("same_device")) return topology;
  TB_ASSIGN_OR_RETURN(const Json* pairs, ArrayField(json, "same_device"));
  for (const Json& pair : *pairs) {
    if (!pair.is_array() || pair.size() != 2) {
      return Status(Code::kInvalidArgument,
                    fmt::format("field 'same_device': a pair [source, target] is needed, not {}",
                                Describe(pair)),
                    Reason::kMalformed);
    }
    TB_ASSIGN_OR_RETURN(const std::uint64_t source,
                        AsUint(pair[0], "field 'same_device'", kMaxRanks));
    TB_ASSIGN_OR_RETURN(const std::uint64_t target,
                        AsUint(pair[1], "field 'same_device'", kMaxRanks));
    topology.same_device.emplace_back(static_cast<std::uint32_t>(source),
                                      static_cast<std::uint32_t>(target));
  }
  return topology;
}

Result<planner::Topology> ReadTopology(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  auto topology = ParseTopology(text);
  if (!topology.ok()) return topology.status().Annotate(path);
  return topology;
}

}  // namespace tensorbus::formats
