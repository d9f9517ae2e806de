#pragma once

#include <ostream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "planner/certificate.h"
#include "planner/cost.h"
#include "planner/plan.h"

namespace tensorbus::cli {

/// One planned transfer with everything that is said about it.
struct PlanReport {
  std::string scenario;  ///< empty for layouts from files
  JobLayout source;
  JobLayout target;
  planner::Topology topology;
  planner::Plan plan;
  planner::PlanFigures figures;
  planner::Certificate certificate;
  std::string why;  ///< why with relays or without, when that was left to the planner
  double plan_seconds = 0;
  double certificate_seconds = 0;
};

/// Keeps fields in the order in which they are put.
using OrderedJson = nlohmann::ordered_json;

/// On one line; invalid UTF-8 in names is replaced rather than thrown about.
std::string Dump(const OrderedJson& json);
/// The fields of docs/interfaces.md, section 3.
OrderedJson ToJson(const PlanReport& report);
/// `{"error": {…}}` of a plan that cannot be.
OrderedJson ErrorToJson(const Status& status, const planner::PlanFault& fault);
/// Where each part of one tensor comes from.
OrderedJson ExplainToJson(const PlanReport& report, std::uint32_t tensor);

/// By transport and kind of window: how many routes, of how many bytes, are best moved so.
OrderedJson WindowsToJson(const PlanReport& report,
                          const std::vector<planner::TransportCost>& costs);

/// A table of one line a report.
void PrintTable(const std::vector<OrderedJson>& reports, std::ostream& out);
void PrintExplanation(const OrderedJson& explanation, std::ostream& out);

/// One op a line. Error: kUnavailable or as the system says, naming the path.
Status WriteOps(const PlanReport& report, const std::string& path);

/// "1.234 GB": decimal units, as bandwidth is told in.
std::string HumanBytes(std::uint64_t bytes);

}  // namespace tensorbus::cli
