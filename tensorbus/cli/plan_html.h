#pragma once

#include <string>

#include "tensorbus/cli/plan_report.h"

namespace tensorbus::cli {

/// A page of its own: who sends how much to whom as a matrix, and what happens in which round.
/// `json` is the report's ToJson().
std::string PlanPage(const PlanReport& report, const OrderedJson& json);

}  // namespace tensorbus::cli
