#include "tensorbus/transport/part_plan.h"

#include <algorithm>

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/copy.h"

namespace tensorbus::transport {

namespace {

/// Where a block longer than a part is cut.
std::uint64_t CutBytes(const StridedBlock& block, std::uint64_t part_bytes) {
  const std::uint64_t row = kernels::RunBytes(block);
  return row < part_bytes ? part_bytes / row * row : part_bytes;
}

}  // namespace

PartPlan::PartPlan(const RouteEnd& target, std::uint64_t part_bytes) {
  TB_CHECK(part_bytes != 0);
  std::uint64_t open_bytes = 0;
  const auto close = [&] {
    if (open_bytes != 0) ends_.push_back(items_.size());
    open_bytes = 0;
  };
  for (std::uint32_t i = 0; i < target.blocks.size(); ++i) {
    const std::uint64_t bytes = target.blocks[i].bytes();
    if (bytes == 0) continue;
    const std::size_t open_items = items_.size() - (ends_.empty() ? 0 : ends_.back());
    if (open_bytes + bytes > part_bytes || open_items >= kItemsMax) close();
    const std::uint64_t cut = bytes > part_bytes ? CutBytes(target.blocks[i], part_bytes) : bytes;
    for (std::uint64_t at = 0; at < bytes; at += cut) {
      const std::uint64_t count = std::min(cut, bytes - at);
      items_.push_back({.block = i, .range = {.first = at, .count = count}});
      open_bytes += count;
      if (open_bytes >= part_bytes || count < bytes) close();
    }
  }
  close();
}

std::span<const PartPlan::Item> PartPlan::part(std::size_t index) const {
  const std::size_t first = index == 0 ? 0 : ends_[index - 1];
  return std::span(items_).subspan(first, ends_[index] - first);
}

}  // namespace tensorbus::transport
