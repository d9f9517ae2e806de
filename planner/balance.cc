#include "planner/balance.h"

#include <algorithm>

#include "planner/max_flow.h"
#include "tensorbus/base/check.h"

namespace tensorbus::planner {
namespace {

std::uint64_t CeilDiv(std::uint64_t a, std::uint64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// A lower bound on MinMaxSend() that needs no flow: every supply by itself, and all together.
std::uint64_t PlainBound(std::span<const Supply> supplies, std::uint32_t source_count) {
  std::uint64_t total = 0;
  std::uint64_t bound = 0;
  std::vector<bool> used(source_count);
  for (const Supply& supply : supplies) {
    total += supply.bytes;
    bound = std::max(bound, CeilDiv(supply.bytes, supply.holders.size()));
    for (const std::uint32_t rank : supply.holders) used[rank] = true;
  }
  const auto sources = static_cast<std::uint64_t>(std::count(used.begin(), used.end(), true));
  return sources == 0 ? bound : std::max(bound, CeilDiv(total, sources));
}

/// Pours `bytes` on the holders with the lowest loads until these stand level.
std::vector<std::uint64_t> Pour(const Supply& supply, std::span<const std::uint64_t> loads) {
  const std::size_t count = supply.holders.size();
  std::vector<std::size_t> order(count);
  for (std::size_t k = 0; k < count; ++k) order[k] = k;
  const auto load = [&](std::size_t k) { return loads[supply.holders[order[k]]]; };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return loads[supply.holders[a]] < loads[supply.holders[b]];
  });
  std::size_t under = 0;  // holders that get some
  std::uint64_t rest = supply.bytes;
  std::uint64_t level = load(0);
  while (true) {
    ++under;
    if (under == count) break;
    const std::uint64_t step = load(under) - level;
    if (step > rest / under) break;
    rest -= step * under;
    level = load(under);
  }
  level += rest / under;
  std::uint64_t extra = rest % under;
  std::vector<std::uint64_t> share(count);
  for (std::size_t k = 0; k < under; ++k) {
    share[order[k]] = level - load(k) + (extra > 0 ? 1 : 0);
    extra -= extra > 0 ? 1 : 0;
  }
  return share;
}

/// Pours each supply, most constrained first, then takes each back and pours it again while that
/// evens the loads: coordinate descent on the sum of squares, which has no false optimum.
class Leveller {
 public:
  Leveller(std::span<const Supply> supplies, std::uint32_t source_count)
      : supplies_(supplies), loads_(source_count), shares_(supplies.size()) {
    order_.resize(supplies.size());
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = i;
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
      return supplies[a].holders.size() < supplies[b].holders.size();
    });
    for (const std::size_t i : order_) Place(i);
  }

  std::uint64_t MaxLoad() const {
    return loads_.empty() ? 0 : *std::max_element(loads_.begin(), loads_.end());
  }

  /// One more round; whether anything moved.
  bool Again() {
    bool moved = false;
    for (const std::size_t i : order_) {
      if (supplies_[i].holders.size() == 1) continue;
      const std::vector<std::uint64_t> before = shares_[i];
      for (std::size_t k = 0; k < before.size(); ++k) loads_[supplies_[i].holders[k]] -= before[k];
      Place(i);
      moved = moved || shares_[i] != before;
    }
    return moved;
  }

  std::vector<std::vector<std::uint64_t>> Take() && { return std::move(shares_); }

 private:
  void Place(std::size_t i) {
    shares_[i] = Pour(supplies_[i], loads_);
    for (std::size_t k = 0; k < shares_[i].size(); ++k)
      loads_[supplies_[i].holders[k]] += shares_[i][k];
  }

  std::span<const Supply> supplies_;
  std::vector<std::uint64_t> loads_;
  std::vector<std::vector<std::uint64_t>> shares_;
  std::vector<std::size_t> order_;
};

bool CloseTo(std::uint64_t load, std::uint64_t bound) {
  return load <= bound + bound / 512;
}

}  // namespace

Result<std::uint64_t> JoinSupplies(std::uint64_t box_bytes, std::uint64_t count,
                                   std::uint64_t* total) {
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(box_bytes, count, &bytes) || bytes > kMaxSupplyBytes - *total) {
    return Status(Code::kResourceExhausted, "the plan would move more than 2^62 bytes",
                  Reason::kUnsupported);
  }
  *total += bytes;
  return bytes;
}

std::uint64_t MinMaxSend(std::span<const Supply> supplies, std::uint32_t source_count) {
  if (supplies.empty()) return 0;
  std::uint64_t cap = PlainBound(supplies, source_count);
  SupplyFlow flow(supplies, source_count);
  while (!flow.Fits(cap)) {
    const std::uint64_t next = flow.CapOfCut();
    TB_CHECK(next > cap);
    cap = next;
  }
  return cap;
}

std::vector<std::vector<std::uint64_t>> Balance(std::span<const Supply> supplies,
                                                std::uint32_t source_count) {
  constexpr int kRoundsMax = 32;
  Leveller leveller(supplies, source_count);
  const std::uint64_t plain = PlainBound(supplies, source_count);
  if (CloseTo(leveller.MaxLoad(), plain)) return std::move(leveller).Take();
  for (int round = 0; round < kRoundsMax && leveller.Again(); ++round) {
  }
  if (CloseTo(leveller.MaxLoad(), plain)) return std::move(leveller).Take();
  const std::uint64_t least = MinMaxSend(supplies, source_count);
  if (CloseTo(leveller.MaxLoad(), least)) return std::move(leveller).Take();
  SupplyFlow flow(supplies, source_count);
  TB_CHECK(flow.Fits(least));
  return flow.Shares();
}

NodeShares BalanceByNode(std::span<const Supply> far, std::span<const Supply> near,
                         std::uint32_t source_count) {
  NodeShares shares;
  shares.far = Balance(far, source_count);
  if (near.empty()) return shares;
  std::vector<Supply> supplies(near.begin(), near.end());
  std::vector<std::uint64_t> loads(source_count);
  for (std::size_t i = 0; i < far.size(); ++i) {
    for (std::size_t k = 0; k < far[i].holders.size(); ++k)
      loads[far[i].holders[k]] += shares.far[i][k];
  }
  // What is settled is a supply that its source alone holds.
  for (std::uint32_t rank = 0; rank < source_count; ++rank) {
    if (loads[rank] != 0) supplies.push_back({{rank}, loads[rank]});
  }
  shares.near = Balance(supplies, source_count);
  shares.near.resize(near.size());
  return shares;
}

}  // namespace tensorbus::planner
