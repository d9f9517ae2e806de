#include "tensorbus/cli/cost_file.h"

#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json.h"

namespace tensorbus::cli {
namespace {

using formats::Json;

constexpr std::uint64_t kMaxCost = std::uint64_t{1} << 40;  ///< of any number in the file

Status ParseNumber(const Json& json, const char* key, bool positive, std::uint64_t* out) {
  TB_ASSIGN_OR_RETURN(*out, formats::UintField(json, key, kMaxCost));
  if (*out != 0 || !positive) return {};
  return {Code::kInvalidArgument, fmt::format("field '{}': must not be 0", key),
          Reason::kMalformed};
}

Result<planner::TransportCost> ParseCost(const Json& json) {
  TB_RETURN_IF_ERROR(formats::CheckObject(json, "a transport"));
  planner::TransportCost cost;
  TB_ASSIGN_OR_RETURN(cost.name, formats::StringField(json, "name"));
  TB_RETURN_IF_ERROR(ParseNumber(json, "bytes_per_us", true, &cost.bytes_per_us));
  TB_RETURN_IF_ERROR(ParseNumber(json, "pack_bytes_per_us", true, &cost.pack_bytes_per_us));
  TB_RETURN_IF_ERROR(ParseNumber(json, "window_bytes", true, &cost.window_bytes));
  TB_RETURN_IF_ERROR(ParseNumber(json, "window_ns", false, &cost.window_ns));
  TB_RETURN_IF_ERROR(ParseNumber(json, "run_ns", false, &cost.run_ns));
  TB_RETURN_IF_ERROR(ParseNumber(json, "row_ns", false, &cost.row_ns));
  TB_RETURN_IF_ERROR(ParseNumber(json, "descriptor_ns", false, &cost.descriptor_ns));
  TB_ASSIGN_OR_RETURN(const Json* strided, formats::Field(json, "strided"));
  TB_ASSIGN_OR_RETURN(cost.strided, formats::AsBool(*strided, "field 'strided'"));
  return cost;
}

}  // namespace

Result<std::vector<planner::TransportCost>> ParseCosts(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, formats::ParseJson(text));
  TB_RETURN_IF_ERROR(formats::CheckObject(json, "a file of costs"));
  TB_ASSIGN_OR_RETURN(const Json* list, formats::ArrayField(json, "transports"));
  std::vector<planner::TransportCost> costs;
  for (std::size_t i = 0; i < list->size(); ++i) {
    auto cost = ParseCost((*list)[i]);
    if (!cost.ok()) return cost.status().Annotate(fmt::format("transport {}", i));
    const bool known = std::any_of(costs.begin(), costs.end(),
                                   [&](const auto& other) { return other.name == cost->name; });
    if (known) {
      return Status(Code::kInvalidArgument,
                    fmt::format("transport {}: '{}' is there already", i, cost->name),
                    Reason::kMalformed);
    }
    costs.push_back(std::move(*cost));
  }
  return costs;
}

Result<std::vector<planner::TransportCost>> ReadCosts(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, formats::ReadText(path));
  auto costs = ParseCosts(text);
  if (!costs.ok()) return costs.status().Annotate(path);
  return costs;
}

}  // namespace tensorbus::cli
