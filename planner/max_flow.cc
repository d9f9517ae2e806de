#include "planner/max_flow.h"

#include <algorithm>
#include <limits>

#include "tensorbus/base/check.h"

namespace tensorbus::planner {
namespace {

constexpr std::uint32_t kStart = 0;
constexpr std::uint32_t kEnd = 1;
constexpr std::uint32_t kFar = std::numeric_limits<std::uint32_t>::max();

}  // namespace

SupplyFlow::SupplyFlow(std::span<const Supply> supplies, std::uint32_t source_count)
    : supplies_(supplies), source_count_(source_count) {
  // Edges in a fixed order: start -> supply, supply -> its holders, source -> end.
  for (std::size_t i = 0; i < supplies_.size(); ++i) {
    total_bytes_ += supplies_[i].bytes;
    AddEdge(kStart, SupplyNode(i));
  }
  for (std::size_t i = 0; i < supplies_.size(); ++i) {
    for (const std::uint32_t rank : supplies_[i].holders) AddEdge(SupplyNode(i), SourceNode(rank));
  }
  for (std::uint32_t rank = 0; rank < source_count_; ++rank) AddEdge(SourceNode(rank), kEnd);
  BuildLists();
}

void SupplyFlow::AddEdge(std::uint32_t from, std::uint32_t to) {
  edges_.push_back({to, 0});
  edges_.push_back({from, 0});
  tails_.push_back(from);
  tails_.push_back(to);
}

void SupplyFlow::BuildLists() {
  const std::size_t nodes = 2 + supplies_.size() + source_count_;
  first_.assign(nodes + 1, 0);
  for (const std::uint32_t tail : tails_) ++first_[tail + 1];
  for (std::size_t n = 0; n < nodes; ++n) first_[n + 1] += first_[n];
  lists_.resize(edges_.size());
  next_.assign(first_.begin(), first_.end() - 1);
  for (std::uint32_t e = 0; e < edges_.size(); ++e) lists_[next_[tails_[e]]++] = e;
}

bool SupplyFlow::FindLevels() {
  levels_.assign(first_.size() - 1, kFar);
  levels_[kStart] = 0;
  std::vector<std::uint32_t> queue = {kStart};
  for (std::size_t i = 0; i < queue.size(); ++i) {
    const std::uint32_t node = queue[i];
    for (std::uint32_t at = first_[node]; at < first_[node + 1]; ++at) {
      const Edge& edge = edges_[lists_[at]];
      if (edge.room == 0 || levels_[edge.to] != kFar) continue;
      levels_[edge.to] = levels_[node] + 1;
      queue.push_back(edge.to);
    }
  }
  return levels_[kEnd] != kFar;
}

/// One more path along the levels; 0 when there is none.
std::uint64_t SupplyFlow::Advance() {
  std::vector<std::uint32_t> path;
  std::uint32_t node = kStart;
  while (node != kEnd) {
    bool moved = false;
    for (std::uint32_t& at = next_[node]; at < first_[node + 1]; ++at) {
      const Edge& edge = edges_[lists_[at]];
      if (edge.room == 0 || levels_[edge.to] != levels_[node] + 1) continue;
      path.push_back(lists_[at]);
      node = edge.to;
      moved = true;
      break;
    }
    if (moved) continue;
    if (path.empty()) return 0;
    node = tails_[path.back()];  // a dead end: never try that edge again on these levels
    ++next_[node];
    path.pop_back();
  }
  std::uint64_t room = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint32_t e : path) room = std::min(room, edges_[e].room);
  for (const std::uint32_t e : path) {
    edges_[e].room -= room;
    edges_[e ^ 1].room += room;
  }
  return room;
}

bool SupplyFlow::Fits(std::uint64_t cap) {
  std::uint32_t e = 0;
  const auto set = [&](std::uint64_t room) {
    edges_[e].room = room;
    edges_[e + 1].room = 0;
    e += 2;
  };
  for (const Supply& supply : supplies_) set(supply.bytes);
  for (const Supply& supply : supplies_) {
    for (std::size_t k = 0; k < supply.holders.size(); ++k) set(kMaxSupplyBytes);
  }
  for (std::uint32_t rank = 0; rank < source_count_; ++rank) set(cap);
  std::uint64_t sent = 0;
  while (FindLevels()) {
    next_.assign(first_.begin(), first_.end() - 1);
    for (std::uint64_t more = Advance(); more != 0; more = Advance()) sent += more;
  }
  return sent == total_bytes_;
}

std::vector<std::vector<std::uint64_t>> SupplyFlow::Shares() const {
  std::vector<std::vector<std::uint64_t>> shares;
  std::size_t e = 2 * supplies_.size();
  for (const Supply& supply : supplies_) {
    auto& share = shares.emplace_back();
    for (std::size_t k = 0; k < supply.holders.size(); ++k, e += 2)
      share.push_back(edges_[e + 1].room);
  }
  return shares;
}

std::uint64_t SupplyFlow::CapOfCut() const {
  std::uint64_t bytes = 0;
  std::uint64_t sources = 0;
  for (std::size_t i = 0; i < supplies_.size(); ++i)
    bytes += levels_[SupplyNode(i)] != kFar ? supplies_[i].bytes : 0;
  for (std::uint32_t rank = 0; rank < source_count_; ++rank)
    sources += levels_[SourceNode(rank)] != kFar ? 1 : 0;
  TB_CHECK(sources > 0);
  return bytes / sources + (bytes % sources != 0 ? 1 : 0);
}

}  // namespace tensorbus::planner
