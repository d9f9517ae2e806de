#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "tensorbus/cli/plan_report.h"

#include "simulate/predict.h"

namespace tensorbus::cli {

/// One predicted transfer with everything that is said about it.
struct SimulateReport {
  Transfer transfer;  ///< as planned: dtypes that travel
  std::string cluster;
  std::string wire;
  std::string sharing;
  std::string relays;  ///< "off" or "on"
  std::string why;     ///< why so, when that was left to the prediction
  planner::PlanFigures figures;
  simulate::Prediction prediction;
  double plan_seconds = 0;
  double simulate_seconds = 0;
};

OrderedJson ToJson(const SimulateReport& report);
/// "40.78 ms", "1.250 s".
std::string SecondsText(double seconds);
/// One line a report; details of the bounds and the critical path when there is only one.
void PrintPredictions(const std::vector<OrderedJson>& reports, std::ostream& out);
/// A page of its own with the utilisation of each kind of link over time.
std::string SimulatePage(const std::vector<OrderedJson>& reports);

}  // namespace tensorbus::cli
