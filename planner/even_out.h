#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/balance.h"
#include "planner/choose.h"

namespace tensorbus::planner {

/// A passage that a source begins.
struct Sent {
  std::uint32_t class_index = 0;
  std::uint32_t at = 0;      ///< in ChosenPaths::by_class of the class
  std::uint32_t supply = 0;  ///< any of its holders could begin it
  std::uint32_t source = 0;  ///< the holder that does
  std::uint64_t bytes = 0;   ///< of one tensor's box
  bool near = false;         ///< it stays on its node; else the supply is one of those from afar
};

/// Moves boxes from busy sources to others that hold them, where shares are too small to be dealt
/// as planned: boxes of less than 64 KiB stay whole, and in small models nothing evens that out.
/// Large plans, where it does not matter, are left alone. Confined.
class EvenOut {
 public:
  explicit EvenOut(std::uint32_t source_count) : loads_(source_count), planned_(source_count) {}

  void Add(const Sent& sent);

  /// Moves boxes until the busiest source is near what BalanceByNode() planned with `shares`: first
  /// of what goes to other nodes, then of what stays on its node.
  void Run(std::span<const Supply> far, std::span<const Supply> near, const NodeShares& shares,
           ChosenPaths* chosen);

 private:
  /// Some tensors of a passage go to another holder.
  struct Move {
    std::size_t sent = 0;
    std::uint32_t holder = 0;
    std::uint32_t tensors = 0;  ///< none: there is no move
    bool new_route = false;
    std::uint64_t busier = 0;  ///< the load of the busier of the two when it is done
  };

  using Shares = std::vector<std::vector<std::uint64_t>>;

  void Even(std::span<const Supply> supplies, const Shares& shares, std::vector<Sent>* sent,
            ChosenPaths* chosen);
  /// A move along a route that there is, if any helps: each new one costs messages.
  Move BestFor(std::uint32_t source, std::span<const Supply> supplies,
               const std::vector<Sent>& sent, const ChosenPaths& chosen) const;
  void Make(const Move& move, std::vector<Sent>* sent, ChosenPaths* chosen);

  bool large_ = false;  // too much to look at
  std::vector<Sent> far_;
  std::vector<Sent> near_;
  std::vector<std::uint64_t> loads_;    // by source
  std::vector<std::uint64_t> planned_;  // by source
};

}  // namespace tensorbus::planner
