#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace tensorbus::simulate {

inline constexpr std::uint32_t kNoLink = std::numeric_limits<std::uint32_t>::max();

/// A link that a flow uses, and what a byte of the flow takes of its capacity.
struct Hop {
  std::uint32_t link = 0;
  double cost = 1;
};

/// One flow that wants bandwidth.
struct Demand {
  std::span<const Hop> hops;
  double weight = 1;                                     ///< its share relative to others; positive
  double cap = std::numeric_limits<double>::infinity();  ///< bytes/s it can use at most
};

struct Allotment {
  double rate = 0;               ///< bytes/s
  std::uint32_t link = kNoLink;  ///< the link that holds it back; kNoLink: its cap
};

/// Shares links among flows, weighted max-min fair: no flow can get more without one of a lower or
/// equal share (rate ÷ weight) getting less. By progressive filling: all shares grow together until
/// a link is full or a cap is reached; the flows concerned stop there. Pure.
std::vector<Allotment> MaxMinShares(std::span<const Demand> demands,
                                    std::span<const double> capacities);

}  // namespace tensorbus::simulate
