#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensorbus/transport/stream_map.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// A route cut into pieces of work of about equal size, for threads to share. Immutable.
class PartPlan {
 public:
  using Item = BlockPart;

  /// Large blocks are cut on the edges of the target's rows where rows are shorter than a part;
  /// small blocks are put together, at most kItemsMax of them. Blocks without bytes are left out.
  PartPlan(const RouteEnd& target, std::uint64_t part_bytes);

  static constexpr std::size_t kItemsMax = 512;

  std::size_t size() const { return ends_.size(); }
  std::span<const Item> part(std::size_t index) const;

 private:
  std::vector<Item> items_;
  std::vector<std::size_t> ends_;  // of each part, in items_
};

}  // namespace tensorbus::transport
