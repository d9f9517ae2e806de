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
/// a link is full or a cap is reached; the flows concerned stop there. Confined.
class MaxMinShares {
 public:
  /// Borrows both. Between calls of Run() only caps may change.
  MaxMinShares(std::span<const Demand> demands, std::span<const double> capacities);

  /// By demand; valid until the next call.
  std::span<const Allotment> Run();

 private:
  struct Link {
    double left = 0;         // capacity not yet given away for good
    double growth = 0;       // bytes/s it takes when all shares grow by one
    double exact = 0;        // the same when it was last added up
    std::uint32_t open = 0;  // flows that still grow
  };
  /// Where a share stops growing, at a link or by a flow's cap: a level of rate ÷ weight.
  struct Stop {
    double level;
    std::uint32_t index;
  };

  static double LevelOf(const Link& link);
  void PushLink(std::uint32_t link);
  void FillLink(std::uint32_t link, double level);
  void Freeze(std::uint32_t flow, double level, std::uint32_t held_by);
  void Renew(std::uint32_t link);

  std::span<const Demand> demands_;
  std::vector<Link> fresh_;  // links as they are before any flow has stopped
  std::vector<Link> links_;
  std::vector<std::uint32_t> first_;  // by link: its flows are users_[first_[l] … first_[l + 1])
  std::vector<std::uint32_t> users_;
  std::vector<Stop> caps_;        // ascending
  std::vector<Stop> full_links_;  // a heap, the lowest level first; levels may have risen since
  std::vector<bool> frozen_;
  std::vector<Allotment> out_;
};

}  // namespace tensorbus::simulate
