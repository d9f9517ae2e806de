#include "tensorbus/transport/joint_plan.h"

#include <algorithm>

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/joint_copy.h"

namespace tensorbus::transport {

/// A block of a route, and the stretch of the source's memory that it lies in.
struct JointPlan::Entry {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t route = 0;
  std::uint32_t block = 0;
  std::uint64_t bytes = 0;
  bool aliased = false;
};

namespace {

std::uint64_t EndOf(const StridedBlock& block) {
  std::uint64_t last = reinterpret_cast<std::uintptr_t>(block.base) + block.item_bytes;
  for (std::size_t d = 0; d < block.rank; ++d) last += (block.extents[d] - 1) * block.strides[d];
  return last;
}

/// Byte where piece `k` of `count` of a block begins: on a run's edge where runs are short.
std::uint64_t CutAt(std::uint64_t bytes, std::uint64_t run, std::uint64_t k, std::uint64_t count) {
  if (k == count) return bytes;
  // Long runs are cut where the digest's blocks of a contiguous tensor end.
  constexpr std::uint64_t kGrain = 4096;
  const std::uint64_t grain = run > kGrain * count ? kGrain : run;
  return bytes / grain * k / count * grain;
}

}  // namespace

JointPlan::JointPlan(std::span<const Route> routes, std::uint64_t part_bytes) {
  TB_CHECK(part_bytes != 0);
  std::vector<Entry> entries;
  for (std::uint32_t r = 0; r < routes.size(); ++r) {
    const auto& blocks = routes[r].source->blocks;
    const std::size_t first = entries.size();
    for (std::uint32_t b = 0; b < blocks.size(); ++b) {
      const std::uint64_t bytes = blocks[b].bytes();
      if (bytes == 0) continue;
      entries.push_back({.begin = reinterpret_cast<std::uintptr_t>(blocks[b].base),
                         .end = EndOf(blocks[b]),
                         .route = r,
                         .block = b,
                         .bytes = bytes,
                         .aliased = false});
    }
    const auto entry_of = [&](std::uint32_t block) {
      return std::lower_bound(entries.begin() + static_cast<std::ptrdiff_t>(first), entries.end(),
                              block, [](const Entry& e, std::uint32_t b) { return e.block < b; });
    };
    for (const RouteEnd::Alias& alias : routes[r].target->aliases) {
      const auto entry = entry_of(alias.block);
      if (entry != entries.end() && entry->block == alias.block) entry->aliased = true;
    }
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  for (std::size_t first = 0; first < entries.size();) {
    std::size_t last = first + 1;
    std::uint64_t end = entries[first].end;
    // A block with aliases is written to several places by itself.
    while (!entries[first].aliased && last < entries.size() && !entries[last].aliased &&
           entries[last].begin < end && last - first < kernels::kJointMax) {
      end = std::max(end, entries[last].end);
      ++last;
    }
    AddCluster(std::span(entries).subspan(first, last - first), routes, part_bytes);
    first = last;
  }
  ClosePart();
}

void JointPlan::AddCluster(std::span<const Entry> cluster, std::span<const Route> routes,
                           std::uint64_t part_bytes) {
  std::uint64_t bytes = 0;
  for (const Entry& entry : cluster) bytes += entry.bytes;
  const std::uint64_t pieces = (bytes + part_bytes - 1) / part_bytes;
  if (pieces > 1 || open_bytes_ + bytes > part_bytes || open_items_ + cluster.size() > kItemsMax) {
    ClosePart();
  }
  for (std::uint64_t k = 0; k < pieces; ++k) {
    for (const Entry& entry : cluster) {
      const Route& route = routes[entry.route];
      const std::uint64_t run = pieces == 1 ? entry.bytes
                                            : kernels::RunBytes(route.source->blocks[entry.block],
                                                                route.target->blocks[entry.block]);
      const std::uint64_t begin = CutAt(entry.bytes, run, k, pieces);
      const std::uint64_t end = CutAt(entry.bytes, run, k + 1, pieces);
      if (begin == end) continue;
      items_.push_back(
          {.route = entry.route, .part = {.block = entry.block, .range = {begin, end - begin}}});
      ++open_items_;
      open_bytes_ += end - begin;
    }
    if (slices_.empty() ? !items_.empty() : slices_.back() != items_.size()) {
      slices_.push_back(items_.size());
    }
    if (pieces > 1) ClosePart();
  }
}

void JointPlan::ClosePart() {
  if (open_bytes_ != 0) parts_.push_back(slices_.size());
  open_bytes_ = 0;
  open_items_ = 0;
}

}  // namespace tensorbus::transport
