#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/plan.h"

namespace tensorbus::planner {

/// How the bytes of a route are cut into what a transport is asked to move.
enum class WindowKind : std::uint8_t {
  kContiguous,  ///< every run that is contiguous on both sides by itself, in place
  kStrided,     ///< one descriptor an op (rows and pitch), in place
  kBucket,      ///< packed at the source, moved in large pieces, unpacked at the target
  kShard,       ///< the sender's whole boxes as they lie; the target picks out what it needs
};
inline constexpr int kWindowKindCount = 4;
const char* WindowKindName(WindowKind kind);

/// What a transport's ways to move bytes cost. A plain value; integers, so that every machine
/// chooses alike.
struct TransportCost {
  std::string name;
  std::uint64_t bytes_per_us = 0;       ///< of the wire, or of the copy; positive
  std::uint64_t pack_bytes_per_us = 0;  ///< of packing or unpacking alone; positive
  std::uint64_t window_bytes = 0;       ///< most bytes in one piece; positive
  std::uint64_t window_ns = 0;          ///< for each piece, beyond its bytes
  std::uint64_t run_ns = 0;             ///< for each run that is asked for by itself
  std::uint64_t descriptor_ns = 0;      ///< for each strided descriptor
  std::uint64_t row_ns = 0;             ///< for each run inside a descriptor, or packed or unpacked
  bool strided = false;                 ///< whether there are strided descriptors at all
};

/// What moving a route would be asked to do.
struct RouteShape {
  std::uint64_t bytes = 0;
  std::uint64_t op_count = 0;
  std::uint64_t run_count = 0;    ///< pieces that are contiguous in the boxes of both sides
  std::uint64_t shard_bytes = 0;  ///< of the sender's boxes that the ops lie in
};

/// The shape of every route, as if each box lay row-major in memory of its own. Layouts and plan
/// must belong together.
std::vector<RouteShape> ShapesOf(const JobLayout& source, const JobLayout& target,
                                 const Plan& plan);

/// Time to move a route by one kind of window, alone on its link.
std::uint64_t WindowNs(const TransportCost& cost, const RouteShape& shape, WindowKind kind);

/// The kind that takes least; the simplest of those that take as long.
WindowKind ChooseWindow(const TransportCost& cost, const RouteShape& shape);

}  // namespace tensorbus::planner
