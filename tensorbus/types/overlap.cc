#include <algorithm>
#include <numeric>
#include <vector>

#include "tensorbus/types/box.h"

namespace tensorbus {
namespace {

using Pair = std::pair<std::size_t, std::size_t>;

/// A box, possibly clipped by a bisection, and which one it was.
struct Candidate {
  Box box;
  std::size_t index;
};

constexpr std::size_t kPairwiseMax = 12;
constexpr std::size_t kBisectMin = 64;
constexpr int kMaxDepth = 64;

Pair Ordered(std::size_t a, std::size_t b) {
  return a < b ? Pair(a, b) : Pair(b, a);
}

/// Every pair; for few boxes.
std::optional<Pair> CompareAll(std::vector<Candidate>& all) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = i + 1; j < all.size(); ++j) {
      if (Intersect(all[i].box, all[j].box)) return Ordered(all[i].index, all[j].index);
    }
  }
  return std::nullopt;
}

/// Sorts by `dim` and returns the starts of the groups that do not touch each other along it.
std::vector<std::size_t> Groups(std::vector<Candidate>& all, int dim) {
  std::sort(all.begin(), all.end(), [dim](const Candidate& a, const Candidate& b) {
    return a.box[dim].lo != b.box[dim].lo ? a.box[dim].lo < b.box[dim].lo : a.index < b.index;
  });
  std::vector<std::size_t> starts = {0};
  std::uint64_t reach = all[0].box[dim].hi;
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (all[i].box[dim].lo >= reach) starts.push_back(i);
    reach = std::max(reach, all[i].box[dim].hi);
  }
  return starts;
}

std::optional<Pair> Search(std::vector<Candidate> all, int depth);

std::optional<Pair> SearchGroups(std::vector<Candidate>& all, std::vector<std::size_t> starts,
                                 int depth) {
  starts.push_back(all.size());
  for (std::size_t g = 0; g + 1 < starts.size(); ++g) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(starts[g]);
    const auto last = all.begin() + static_cast<std::ptrdiff_t>(starts[g + 1]);
    if (last - first < 2) continue;
    if (auto found = Search({first, last}, depth + 1)) return found;
  }
  return std::nullopt;
}

/// Cuts space in two at the median start of the dimension where fewest boxes straddle the cut.
std::optional<Pair> Bisect(std::vector<Candidate>& all, int depth) {
  const std::size_t count = all.size();
  int best_dim = -1;
  std::uint64_t best_cut = 0;
  std::size_t best_larger = count;
  std::vector<std::uint64_t> starts(count);
  for (int d = 0; d < all[0].box.rank(); ++d) {
    for (std::size_t i = 0; i < count; ++i) starts[i] = all[i].box[d].lo;
    std::nth_element(starts.begin(), starts.begin() + static_cast<std::ptrdiff_t>(count / 2),
                     starts.end());
    const std::uint64_t cut = starts[count / 2];
    std::size_t left = 0;
    std::size_t right = 0;
    for (const Candidate& c : all) {
      left += c.box[d].lo < cut ? 1 : 0;
      right += c.box[d].hi > cut ? 1 : 0;
    }
    if (left != 0 && std::max(left, right) < best_larger) {
      best_larger = std::max(left, right);
      best_dim = d;
      best_cut = cut;
    }
  }
  if (best_dim < 0) return CompareAll(all);
  std::vector<Candidate> halves[2];
  for (const Candidate& c : all) {
    if (c.box[best_dim].lo < best_cut) {
      halves[0].push_back(c);
      Range& range = halves[0].back().box[best_dim];
      range.hi = std::min(range.hi, best_cut);
    }
    if (c.box[best_dim].hi > best_cut) {
      halves[1].push_back(c);
      Range& range = halves[1].back().box[best_dim];
      range.lo = std::max(range.lo, best_cut);
    }
  }
  all.clear();
  if (auto found = Search(std::move(halves[0]), depth + 1)) return found;
  return Search(std::move(halves[1]), depth + 1);
}

std::optional<Pair> Search(std::vector<Candidate> all, int depth) {
  if (all.size() < 2) return std::nullopt;
  const int dims = all[0].box.rank();
  if (all.size() <= kPairwiseMax || dims == 0) return CompareAll(all);
  for (int d = 0; d < dims; ++d) {
    auto starts = Groups(all, d);
    if (starts.size() > 1) return SearchGroups(all, std::move(starts), depth);
  }
  if (all.size() < kBisectMin || depth > kMaxDepth) return CompareAll(all);
  return Bisect(all, depth);
}

}  // namespace

std::optional<std::pair<std::size_t, std::size_t>> FindOverlap(std::span<const Box> boxes) {
  if (boxes.size() < 2) return std::nullopt;
  std::vector<Candidate> all;
  all.reserve(boxes.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) all.push_back({boxes[i], i});
  return Search(std::move(all), 0);
}

}  // namespace tensorbus
