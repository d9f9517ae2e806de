#pragma once

#include "planner/certificate.h"
#include "planner/plan.h"

namespace tensorbus::planner {

/// A plan that has passed its certificate.
struct CheckedPlan {
  Plan plan;
  Certificate certificate;
  PlanFigures figures;
};

/// Fails where planning or the certificate does.
inline Result<CheckedPlan> MakeCheckedPlan(const JobLayout& source, const JobLayout& target,
                                           const Topology& topology,
                                           const PlanOptions& options = {}) {
  CheckedPlan checked;
  TB_ASSIGN_OR_RETURN(checked.plan, BuildPlan(source, target, topology, nullptr, options));
  TB_ASSIGN_OR_RETURN(checked.certificate,
                      CheckPlan(source, target, topology, checked.plan, options.lost));
  TB_ASSIGN_OR_RETURN(checked.figures, FiguresOf(source, target, topology, checked.plan));
  return checked;
}

}  // namespace tensorbus::planner
