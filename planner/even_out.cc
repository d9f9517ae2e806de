#include "planner/even_out.h"

#include <algorithm>
#include <tuple>

namespace tensorbus::planner {
namespace {

/// Most passages, all of which are looked at for each move, and most moves. With more of them a box
/// that stays whole is little beside a share.
constexpr std::size_t kSentMax = 1 << 11;
/// Up to one part in so many above what was planned is near enough: a move may cost a route.
constexpr std::uint64_t kNearParts = 64;

}  // namespace

void EvenOut::Add(const Sent& sent) {
  large_ = large_ || far_.size() + near_.size() == kSentMax;
  if (!large_) (sent.near ? near_ : far_).push_back(sent);
}

void EvenOut::Run(std::span<const Supply> far, std::span<const Supply> near,
                  const NodeShares& shares, ChosenPaths* chosen) {
  if (large_) return;
  Even(far, shares.far, &far_, chosen);
  Even(near, shares.near, &near_, chosen);
}

void EvenOut::Even(std::span<const Supply> supplies, const Shares& shares, std::vector<Sent>* sent,
                   ChosenPaths* chosen) {
  if (sent->empty()) return;
  for (std::size_t i = 0; i < supplies.size(); ++i) {
    for (std::size_t k = 0; k < shares[i].size(); ++k)
      planned_[supplies[i].holders[k]] += shares[i][k];
  }
  for (const Sent& one : *sent) {
    const Passage& passage = chosen->by_class[one.class_index][one.at];
    loads_[one.source] += one.bytes * (passage.last - passage.first);
  }
  const std::uint64_t most = *std::max_element(planned_.begin(), planned_.end());
  for (std::size_t moves = 0; moves < kSentMax; ++moves) {
    const auto busiest = std::max_element(loads_.begin(), loads_.end());
    if (*busiest <= most + most / kNearParts) break;
    const auto source = static_cast<std::uint32_t>(busiest - loads_.begin());
    const Move move = BestFor(source, supplies, *sent, *chosen);
    if (move.tensors == 0) break;
    Make(move, sent, chosen);
  }
}

EvenOut::Move EvenOut::BestFor(std::uint32_t source, std::span<const Supply> supplies,
                               const std::vector<Sent>& sent, const ChosenPaths& chosen) const {
  Move best;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const Sent& one = sent[i];
    if (one.source != source) continue;
    const Passage& passage = chosen.by_class[one.class_index][one.at];
    for (const std::uint32_t holder : supplies[one.supply].holders) {
      if (loads_[holder] + one.bytes >= loads_[source]) continue;  // nor is it the source itself
      const std::uint64_t half = (loads_[source] - loads_[holder]) / 2 / one.bytes;
      const auto tensors = static_cast<std::uint32_t>(
          std::clamp<std::uint64_t>(half, 1, passage.last - passage.first));
      const std::uint64_t busier =
          std::max(loads_[source] - tensors * one.bytes, loads_[holder] + tensors * one.bytes);
      const bool new_route = !chosen.HasRouteFrom(holder, passage.path);
      if (best.tensors == 0 ||
          std::tuple(new_route, busier) < std::tuple(best.new_route, best.busier)) {
        best = {i, holder, tensors, new_route, busier};
      }
    }
  }
  return best;
}

void EvenOut::Make(const Move& move, std::vector<Sent>* sent, ChosenPaths* chosen) {
  Sent moved = (*sent)[move.sent];
  std::vector<Passage>& passages = chosen->by_class[moved.class_index];
  loads_[moved.source] -= move.tensors * moved.bytes;
  loads_[move.holder] += move.tensors * moved.bytes;
  moved.source = move.holder;
  Passage& rest = passages[moved.at];
  Passage part = rest;
  part.path = chosen->FromAnother(part.path, move.holder);
  part.first = part.last - move.tensors;
  if (part.first == rest.first) {
    rest = part;
    (*sent)[move.sent] = moved;
    return;
  }
  rest.last = part.first;
  moved.at = static_cast<std::uint32_t>(passages.size());
  passages.push_back(part);
  sent->push_back(moved);
}

}  // namespace tensorbus::planner
