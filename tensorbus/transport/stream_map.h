#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tensorbus/kernels/digest.h"
#include "tensorbus/kernels/walk.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// A part of one block.
struct BlockPart {
  std::uint32_t block = 0;
  kernels::ByteRange range;
};

/// Where the blocks of one end stand in the route's byte stream. Immutable.
class StreamMap {
 public:
  explicit StreamMap(std::span<const StridedBlock> blocks);

  std::uint64_t bytes() const { return starts_.back(); }
  /// The block that holds byte `at` of the stream; `at` must be inside.
  std::uint32_t BlockAt(std::uint64_t at) const;
  /// Longest count <= `bytes_max` from `first` on that touches at most `parts_max` blocks.
  std::uint64_t Window(std::uint64_t first, std::uint64_t bytes_max, std::uint32_t parts_max) const;
  /// Runs of memory that [first, first + count) lies in, at least.
  std::uint64_t RunCount(std::uint64_t first, std::uint64_t count) const;

  /// Calls visit(BlockPart) for every block with bytes in [first, first + count).
  template <typename Visit>
  void ForEachPart(std::uint64_t first, std::uint64_t count, const Visit& visit) const {
    if (count == 0) return;
    const std::uint64_t end = first + count;
    for (std::uint32_t block = BlockAt(first); first < end; ++block) {
      const std::uint64_t next = std::min(end, starts_[block + 1]);
      if (next == first) continue;
      visit(BlockPart{.block = block,
                      .range = {.first = first - starts_[block], .count = next - first}});
      first = next;
    }
  }

 private:
  std::vector<std::uint64_t> starts_;  // of every block, and the end of the last
  std::vector<std::uint64_t> runs_;    // RunBytes() of every block
};

/// Goes through the memory of one end in stream order, run by run. Confined; borrows map and
/// blocks.
class StreamCursor {
 public:
  /// Stands at byte `first`, which may be the end.
  StreamCursor(const StreamMap& map, std::span<const StridedBlock> blocks, std::uint64_t first);

  std::uint64_t at() const { return at_; }
  /// The next contiguous run, at most `limit` (> 0) bytes. Not at the end.
  std::span<std::byte> Next(std::uint64_t limit);

 private:
  const StreamMap* map_;
  std::span<const StridedBlock> blocks_;
  std::uint64_t at_;
  std::uint32_t block_ = 0;
  std::uint64_t left_in_block_ = 0;
  std::optional<kernels::Walk<1>> walk_;
};

}  // namespace tensorbus::transport
