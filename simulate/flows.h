#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"

#include "simulate/max_min.h"

namespace tensorbus::simulate {

/// How routes that want one link at the same time share it.
enum class Sharing : std::uint8_t {
  kRemaining,  ///< in proportion to what each has left: windows are granted by need
  kEqual,      ///< equally, as connections do that know nothing of each other
  kRounds,     ///< one after the other: a rank sends one route and receives one, by round
};

/// Bytes that a relayed flow passes on and another brings.
struct Feed {
  std::uint32_t flow = 0;
  double bytes = 0;
};

/// One route in motion.
struct Flow {
  std::vector<Hop> hops;
  double bytes = 0;
  double window_bytes = 0;     ///< a relay passes a window on when all of it is there
  std::vector<Feed> feeds;     ///< of a relayed flow: all its bytes; flows earlier in the list
  std::uint32_t sender = 0;    ///< for kRounds: distinct ranks have distinct numbers
  std::uint32_t receiver = 0;  ///< for kRounds
  std::uint32_t round = 0;     ///< for kRounds
};

/// When a flow moved and what held it back in the end.
struct FlowTimes {
  double start_s = 0;
  double end_s = 0;
  std::uint32_t link = kNoLink;  ///< kNoLink: what feeds it
};

/// A stretch of time with constant rates: how much of each group of links is in use.
struct Stretch {
  double begin_s = 0;
  double end_s = 0;
  std::vector<double> used;  ///< by group, bytes/s
};

struct FlowOutcome {
  std::vector<FlowTimes> times;  ///< by flow
  std::vector<Stretch> stretches;
  double end_s = 0;  ///< the last byte arrives
};

struct FlowOptions {
  Sharing sharing = Sharing::kRemaining;
  /// Flows that end within this share of the busiest link's time end together: bounds the work,
  /// and the error, of plans whose many routes end one by one.
  double grain = 1e-3;
  /// By link: what it counts to in Stretch; empty: all to 0.
  std::span<const std::uint32_t> groups = {};
};

/// Moves flows over links of the given capacities (bytes/s) in virtual time. Rates are weighted
/// max-min shares and change when a flow ends, starts, or a relay has caught up with what feeds it:
/// then it goes as fast as that. Pure, deterministic.
///
/// Error: kInternal when nothing can move any more, which a feed from a later flow would cause.
Result<FlowOutcome> RunFlows(std::span<const Flow> flows, std::span<const double> capacities,
                             const FlowOptions& options = {});

}  // namespace tensorbus::simulate
