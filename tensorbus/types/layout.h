#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/box.h"
#include "tensorbus/types/dtype.h"

namespace tensorbus {

/// Bounds on what a job may describe; input beyond them is refused before anything is allocated for
/// it.
inline constexpr std::uint32_t kMaxRanks = 65536;
inline constexpr std::uint32_t kMaxTensors = 4'000'000;
inline constexpr std::uint32_t kMaxNameBytes = 1024;

/// One logical tensor of a manifest.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;

  std::uint64_t bytes() const { return shape.elements() * ItemBytes(dtype); }
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

/// The boxes one rank holds of one tensor, in the rank's own order. Disjoint and not empty.
struct RankBoxes {
  std::uint32_t rank = 0;
  std::vector<Box> boxes;

  friend bool operator==(const RankBoxes&, const RankBoxes&) = default;
};

/// Who holds what of one tensor. Shared by all tensors of a class (same shape, same placement).
/// Sorted by rank; ranks that hold nothing are left out.
struct Holding {
  std::vector<RankBoxes> ranks;

  friend bool operator==(const Holding&, const Holding&) = default;
};

/// How one job (or one replica of it) holds its tensors, resolved to boxes. A plain value.
struct JobLayout {
  struct Tensor {
    TensorSpec spec;
    std::uint32_t holding = 0;  ///< index into `holdings`

    friend bool operator==(const Tensor&, const Tensor&) = default;
  };

  std::uint32_t rank_count = 0;
  std::vector<Tensor> tensors;  ///< names are unique
  std::vector<Holding> holdings;

  const Holding& HoldingOf(const Tensor& tensor) const { return holdings[tensor.holding]; }
  friend bool operator==(const JobLayout&, const JobLayout&) = default;
};

/// Everything one rank holds: what a worker registers and an agent reports, before ranks are put
/// together.
struct RankLayout {
  struct Tensor {
    TensorSpec spec;
    std::vector<Box> boxes;

    friend bool operator==(const Tensor&, const Tensor&) = default;
  };
  std::vector<Tensor> tensors;

  friend bool operator==(const RankLayout&, const RankLayout&) = default;
};

/// Checks one layout by itself: names unique and bounded, boxes in range, not empty, a rank's own
/// boxes of a tensor disjoint, holding indices valid. The error names tensor and rank.
Status Validate(const JobLayout& layout);
Status Validate(const RankLayout& layout, std::uint32_t rank);

/// Identifies a layout: equal layouts have equal hashes, on every machine.
Hash128 HashOf(const Holding& holding);
Hash128 HashOf(const JobLayout& layout);
Hash128 HashOf(const RankLayout& layout);

/// Collects the holdings of a layout under construction; equal ones are stored once. Confined.
class HoldingPool {
 public:
  /// The holding's index.
  std::uint32_t Intern(Holding holding);
  std::vector<Holding> Take() && { return std::move(holdings_); }

 private:
  struct ByLowHalf {
    std::size_t operator()(const Hash128& hash) const noexcept {
      return static_cast<std::size_t>(hash.low);
    }
  };
  std::unordered_map<Hash128, std::uint32_t, ByLowHalf> index_;
  std::vector<Holding> holdings_;
};

/// Compact binary form, for gRPC payloads and caches. Parse checks bounds and then Validate()s.
std::vector<std::byte> Serialize(const RankLayout& layout);
std::vector<std::byte> Serialize(const JobLayout& layout);
Result<RankLayout> ParseRankLayout(std::span<const std::byte> bytes, std::uint32_t rank);
Result<JobLayout> ParseJobLayout(std::span<const std::byte> bytes);

}  // namespace tensorbus
