#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/plan.h"

#include "simulate/cluster.h"
#include "simulate/flows.h"
#include "simulate/wire_form.h"

namespace tensorbus::simulate {

/// A time that cannot be undercut, and why.
struct Bound {
  std::string name;  ///< "receive", "rank", "node_in" or "plan"
  double seconds = 0;
  std::string why;
};

/// One kind of link, all of them together.
struct LinkKind {
  std::string name;              ///< "nic out", "nvlink in", …
  std::uint32_t count = 0;       ///< links of this kind that are in use
  double capacity = 0;           ///< bytes/s of these
  double bytes = 0;              ///< that pass over them
  double busiest_s = 0;          ///< how long the busiest of them is in use at full speed
  std::string busiest;           ///< its name
  std::vector<double> timeline;  ///< share in use, in equal slices of the whole time
};

/// A route on the chain that decides when the last byte arrives.
struct PathStep {
  std::string from;
  std::string to;
  double start_s = 0;
  double end_s = 0;
  double bytes = 0;
  std::string held_by;  ///< the link that holds it back, or what feeds it
};

/// What a plan is expected to take. A prediction: nothing here was measured.
struct Prediction {
  double seconds = 0;         ///< until the last byte arrives
  std::vector<Bound> bounds;  ///< largest first; "plan" (this plan's busiest link) last
  double wire_bytes = 0;      ///< that leave a device, relays counted
  std::vector<LinkKind> kinds;
  std::string busiest;  ///< the busiest link
  double busiest_s = 0;
  std::vector<PathStep> critical_path;  ///< from a first-hand route to the last byte
};

struct PredictOptions {
  Sharing sharing = Sharing::kRemaining;
  std::size_t slices = 100;  ///< of the timelines
};

/// What a plan moves, for which this is asked.
struct Move {
  const planner::Plan& plan;
  const JobLayout& target;  ///< as planned: dtypes that travel
  const planner::PlanFigures& figures;
  std::vector<bool> quantised;  ///< by target tensor: scales travel too; may be empty
  std::uint64_t far_bytes = 0;  ///< the least that the busiest rank moves between domains, one way
};

/// Runs a plan on a cluster in virtual time: routes are flows over the links between the seats of
/// their ranks, relays pass on window by window what has arrived. Pure. Errors: as RunFlows().
Result<Prediction> Predict(const Cluster& cluster, const Seating& seating, const Move& move,
                           const PredictOptions& options = {});

}  // namespace tensorbus::simulate
