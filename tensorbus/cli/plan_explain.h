#pragma once

#include <ostream>

#include "tensorbus/cli/plan_report.h"

namespace tensorbus::cli {

/// Who sends each part of one tensor to whom, and why that holder.
OrderedJson ExplainToJson(const PlanReport& report, std::uint32_t tensor);
void PrintExplanation(const OrderedJson& explanation, std::ostream& out);

}  // namespace tensorbus::cli
