#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "planner/relay_certificate.h"

namespace tensorbus::planner {

/// Lists of arrivals that grow side by side; for certificate.cc.
///
/// A list is a number. Lists that begin alike are one list up to where they part, so that two of
/// one beginning are equal exactly when their numbers are, and to compare them costs nothing.
/// Confined.
class ArrivalLists {
 public:
  void Clear();
  std::size_t size() const { return lists_.size(); }

  /// The beginning of new lists: an empty one that equals no other.
  std::uint32_t Begin();

  /// The list that has one arrival more than `list`. The same question asked twice has one answer;
  /// it mostly comes again at once.
  std::uint32_t Longer(std::uint32_t list, const Arrival& arrival) {
    const List& from = lists_[list];
    return from.next == arrival ? from.longer : Other(list, arrival);
  }

  /// Appends what is in a list, in the order in which it came.
  void Read(std::uint32_t list, std::vector<Arrival>* arrivals) const;

 private:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

  struct List {
    std::uint32_t before = kNone;  // the list without its last arrival
    Arrival last;
    std::uint32_t longer = kNone;  // the list with `next` after it: the one that was last asked for
    Arrival next = {kNone, kNone};
  };

  std::uint32_t Other(std::uint32_t list, const Arrival& arrival);

  std::vector<List> lists_;
  /// Where lists part: all that ever was some list's `longer`, but for its newest.
  std::map<std::pair<std::uint32_t, Arrival>, std::uint32_t> partings_;
};

}  // namespace tensorbus::planner
