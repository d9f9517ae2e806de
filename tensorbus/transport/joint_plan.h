#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tensorbus/transport/stream_map.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// Several routes out of one source, in this process's memory, cut into pieces of work of about
/// equal size. Immutable.
///
/// Parts of blocks that lie among each other in the source's memory (rows of which each target
/// takes some columns, or one shard for several replicas) make one slice: to be copied in one pass
/// over that memory. Slices follow each other in the source's order.
class JointPlan {
 public:
  struct Item {
    std::uint32_t route = 0;
    BlockPart part;
  };
  /// The two ends of a route; block i of one is block i of the other.
  struct Route {
    const RouteEnd* source = nullptr;
    const RouteEnd* target = nullptr;
  };
  static constexpr std::size_t kItemsMax = 512;  ///< of a part that is not one slice

  JointPlan() = default;
  /// Borrows the ends for the call.
  JointPlan(std::span<const Route> routes, std::uint64_t part_bytes);

  std::size_t size() const { return parts_.size(); }
  /// Slices of part `index`, as indices for slice().
  std::pair<std::size_t, std::size_t> part(std::size_t index) const {
    return {index == 0 ? 0 : parts_[index - 1], parts_[index]};
  }
  std::span<const Item> slice(std::size_t index) const {
    const std::size_t first = index == 0 ? 0 : slices_[index - 1];
    return std::span(items_).subspan(first, slices_[index] - first);
  }

 private:
  struct Entry;
  void AddCluster(std::span<const Entry> cluster, std::span<const Route> routes,
                  std::uint64_t part_bytes);
  void ClosePart();

  std::vector<Item> items_;
  std::vector<std::size_t> slices_;  ///< ends, in items_
  std::vector<std::size_t> parts_;   ///< ends, in slices_
  std::uint64_t open_bytes_ = 0;     ///< of the part that is being filled
  std::size_t open_items_ = 0;
};

}  // namespace tensorbus::transport
