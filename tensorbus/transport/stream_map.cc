#include "tensorbus/transport/stream_map.h"

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/copy.h"

namespace tensorbus::transport {

StreamMap::StreamMap(std::span<const StridedBlock> blocks) {
  starts_.reserve(blocks.size() + 1);
  runs_.reserve(blocks.size());
  starts_.push_back(0);
  for (const StridedBlock& block : blocks) {
    starts_.push_back(starts_.back() + block.bytes());
    runs_.push_back(std::max<std::uint64_t>(1, kernels::RunBytes(block)));
  }
}

std::uint32_t StreamMap::BlockAt(std::uint64_t at) const {
  TB_DCHECK(at < bytes());
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), at);
  return static_cast<std::uint32_t>(after - starts_.begin() - 1);
}

std::uint64_t StreamMap::Window(std::uint64_t first, std::uint64_t bytes_max,
                                std::uint32_t parts_max) const {
  const std::uint64_t count = std::min(bytes_max, bytes() - first);
  if (count == 0) return 0;
  const std::uint64_t last = std::uint64_t{BlockAt(first)} + parts_max;
  return last < starts_.size() ? std::min(count, starts_[last] - first) : count;
}

std::uint64_t StreamMap::RunCount(std::uint64_t first, std::uint64_t count) const {
  std::uint64_t runs = 0;
  ForEachPart(first, count, [&](const BlockPart& part) {
    runs += (part.range.count + runs_[part.block] - 1) / runs_[part.block];
  });
  return runs;
}

StreamCursor::StreamCursor(const StreamMap& map, std::span<const StridedBlock> blocks,
                           std::uint64_t first)
    : map_(&map), blocks_(blocks), at_(first) {}

std::span<std::byte> StreamCursor::Next(std::uint64_t limit) {
  if (left_in_block_ == 0) {
    block_ = map_->BlockAt(at_);
    map_->ForEachPart(at_, 1, [&](const BlockPart& part) {
      left_in_block_ = blocks_[block_].bytes() - part.range.first;
      walk_.emplace(kernels::MemoryWalk(blocks_[block_]));
      walk_->Seek(part.range.first);
    });
  }
  const auto rows = walk_->Next(std::min(limit, walk_->left_in_run()));
  at_ += rows.bytes;
  left_in_block_ -= rows.bytes;
  return {kernels::PointerAt(rows.at[0]), static_cast<std::size_t>(rows.bytes)};
}

}  // namespace tensorbus::transport
