#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "planner/certificate.h"
#include "planner/cost.h"
#include "planner/plan.h"
#include "tensorbus/cli/ordered_json.h"
#include "tensorbus/cli/transfer.h"

namespace tensorbus::cli {

/// One planned transfer with everything that is said about it.
struct PlanReport {
  Transfer transfer;
  planner::Topology topology;
  planner::Plan plan;
  planner::PlanFigures figures;
  planner::Certificate certificate;
  std::string why;  ///< why with relays or without, when that was left to the planner
  double plan_seconds = 0;
  double certificate_seconds = 0;
};

/// Which transfer it is: the scenario, or the model and how both sides hold it.
void PutNames(const Transfer& transfer, OrderedJson* json);
/// What to call a report in a table.
std::string LabelOf(const OrderedJson& report);

/// `[[lo, hi], …]`.
OrderedJson BoxToJson(const Box& box);

/// The fields of docs/interfaces.md, section 3.
OrderedJson ToJson(const PlanReport& report);
/// `{"error": {…}}` of a plan that cannot be.
OrderedJson ErrorToJson(const Status& status, const planner::PlanFault& fault);

/// By transport and kind of window: how many routes, of how many bytes, are best moved so.
OrderedJson WindowsToJson(const PlanReport& report,
                          const std::vector<planner::TransportCost>& costs);

/// A table of one line a report.
void PrintTable(const std::vector<OrderedJson>& reports, std::ostream& out);

/// One op a line. Error: kUnavailable or as the system says, naming the path.
Status WriteOps(const PlanReport& report, const std::string& path);

}  // namespace tensorbus::cli
