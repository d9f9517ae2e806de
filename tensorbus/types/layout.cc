#include "tensorbus/types/layout.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tensorbus/base/malformed.h"
#include "tensorbus/types/layout_combiner.h"

namespace tensorbus {
namespace {

/// Names are quoted in messages, cut to a readable length.
std::string Quoted(std::string_view name) {
  constexpr std::size_t kShown = 120;
  if (name.size() <= kShown) return fmt::format("'{}'", name);
  return fmt::format("'{}…'", name.substr(0, kShown));
}

Status CheckBoxes(std::span<const Box> boxes, const Shape& shape) {
  for (const Box& box : boxes) {
    if (!box.Fits(shape)) {
      return Malformed(
          fmt::format("box {} does not fit shape {}", box.ToString(), shape.ToString()),
          Reason::kLayoutMismatch);
    }
    if (box.empty()) return Malformed(fmt::format("box {} is empty", box.ToString()));
  }
  return {};
}

Status CheckDisjoint(std::span<const Box> boxes) {
  const auto overlap = FindOverlap(boxes);
  if (!overlap) return {};
  return Malformed(fmt::format("boxes {} and {} overlap", boxes[overlap->first].ToString(),
                               boxes[overlap->second].ToString()),
                   Reason::kOverlap);
}

/// Collects names and refuses the second of two equal ones. Borrows the names.
class NameCheck {
 public:
  explicit NameCheck(std::size_t count) { seen_.reserve(count); }

  Status Add(const TensorSpec& spec) {
    if (spec.name.empty()) return Malformed("a tensor without a name");
    if (spec.name.size() > kMaxNameBytes) {
      return Malformed(
          fmt::format("tensor {}: name is longer than {} bytes", Quoted(spec.name), kMaxNameBytes));
    }
    if (!seen_.insert(spec.name).second)
      return Malformed(fmt::format("tensor {} appears twice", Quoted(spec.name)));
    if (spec.shape.elements() > kMaxTensorBytes / ItemBytes(spec.dtype)) {
      return Malformed(
          fmt::format("tensor {}: more than {} bytes", Quoted(spec.name), kMaxTensorBytes));
    }
    return {};
  }

 private:
  std::unordered_set<std::string_view> seen_;
};

/// What a holding demands of a shape, so that each of many tensors is checked in constant time.
struct HoldingBounds {
  bool any = false;
  int dims = 0;
  std::array<std::uint64_t, kMaxDims> reach = {};

  bool Fits(const Shape& shape) const {
    if (!any) return true;
    if (dims != shape.rank()) return false;
    for (int d = 0; d < dims; ++d) {
      if (reach[static_cast<std::size_t>(d)] > shape[d]) return false;
    }
    return true;
  }
};

/// Checks what does not depend on a tensor: rank order, dimensions, emptiness, disjointness.
Status CheckHolding(const Holding& holding, std::uint32_t rank_count, HoldingBounds* bounds) {
  std::int64_t previous = -1;
  for (const RankBoxes& held : holding.ranks) {
    if (held.rank >= rank_count)
      return Malformed(fmt::format("rank {} of {}", held.rank, rank_count));
    if (static_cast<std::int64_t>(held.rank) <= previous)
      return Malformed(fmt::format("rank {} is out of order or repeated", held.rank));
    previous = held.rank;
    if (held.boxes.empty()) return Malformed(fmt::format("rank {} holds no box", held.rank));
    for (const Box& box : held.boxes) {
      if (!bounds->any) bounds->dims = box.rank();
      bounds->any = true;
      if (box.rank() != bounds->dims)
        return Malformed(fmt::format("rank {}: boxes differ in dimensions", held.rank));
      if (box.empty())
        return Malformed(fmt::format("rank {}: box {} is empty", held.rank, box.ToString()));
      for (int d = 0; d < box.rank(); ++d) {
        auto& reach = bounds->reach[static_cast<std::size_t>(d)];
        reach = std::max(reach, box[d].hi);
      }
    }
    TB_RETURN_IF_ERROR(CheckDisjoint(held.boxes).Annotate(fmt::format("rank {}", held.rank)));
  }
  return {};
}

/// The first rank whose boxes do not fit, for the message.
Status DescribeMisfit(const JobLayout::Tensor& tensor, const Holding& holding) {
  for (const RankBoxes& held : holding.ranks) {
    TB_RETURN_IF_ERROR(
        CheckBoxes(held.boxes, tensor.spec.shape)
            .Annotate(fmt::format("tensor {}: rank {}", Quoted(tensor.spec.name), held.rank)));
  }
  return Malformed(fmt::format("tensor {}: holding does not fit", Quoted(tensor.spec.name)));
}

Status CheckCounts(std::size_t tensors, std::uint64_t rank_count) {
  if (tensors > kMaxTensors)
    return Malformed(fmt::format("{} tensors; at most {} are supported", tensors, kMaxTensors));
  if (rank_count == 0 || rank_count > kMaxRanks)
    return Malformed(fmt::format("{} ranks; 1 to {} are supported", rank_count, kMaxRanks));
  return {};
}

void AddSpec(Hasher& hasher, const TensorSpec& spec) {
  hasher.AddString(spec.name);
  hasher.AddU8(static_cast<std::uint8_t>(spec.dtype));
  hasher.AddU8(static_cast<std::uint8_t>(spec.shape.rank()));
  for (const std::uint64_t dim : spec.shape.dims()) hasher.AddU64(dim);
}

void AddBoxes(Hasher& hasher, std::span<const Box> boxes) {
  hasher.AddU64(boxes.size());
  for (const Box& box : boxes) {
    hasher.AddU8(static_cast<std::uint8_t>(box.rank()));
    for (const Range& range : box.ranges()) {
      hasher.AddU64(range.lo);
      hasher.AddU64(range.hi);
    }
  }
}

void AddHolding(Hasher& hasher, const Holding& holding) {
  hasher.AddU64(holding.ranks.size());
  for (const RankBoxes& held : holding.ranks) {
    hasher.AddU32(held.rank);
    AddBoxes(hasher, held.boxes);
  }
}

/// The same tensor as two ranks describe it.
Status CheckSame(const TensorSpec& first, const TensorSpec& second, std::size_t rank) {
  if (first.dtype != second.dtype) {
    return {Code::kInvalidArgument,
            fmt::format("tensor {}: rank {} says {}, an earlier rank {}", Quoted(first.name), rank,
                        DTypeName(second.dtype), DTypeName(first.dtype)),
            Reason::kDtypeMismatch};
  }
  if (first.shape != second.shape) {
    return {Code::kInvalidArgument,
            fmt::format("tensor {}: rank {} says shape {}, an earlier rank {}", Quoted(first.name),
                        rank, second.shape.ToString(), first.shape.ToString()),
            Reason::kLayoutMismatch};
  }
  return {};
}

}  // namespace

Status Validate(const JobLayout& layout) {
  TB_RETURN_IF_ERROR(CheckCounts(layout.tensors.size(), layout.rank_count));
  std::vector<HoldingBounds> bounds(layout.holdings.size());
  std::vector<Status> faults(layout.holdings.size());
  bool all_fine = true;
  for (std::size_t h = 0; h < layout.holdings.size(); ++h) {
    faults[h] = CheckHolding(layout.holdings[h], layout.rank_count, &bounds[h]);
    all_fine = all_fine && faults[h].ok();
  }
  NameCheck names(layout.tensors.size());
  for (const JobLayout::Tensor& tensor : layout.tensors) {
    TB_RETURN_IF_ERROR(names.Add(tensor.spec));
    if (tensor.holding >= layout.holdings.size()) {
      return Malformed(fmt::format("tensor {}: holding {} of {}", Quoted(tensor.spec.name),
                                   tensor.holding, layout.holdings.size()));
    }
    TB_RETURN_IF_ERROR(
        faults[tensor.holding].Annotate(fmt::format("tensor {}", Quoted(tensor.spec.name))));
    if (!bounds[tensor.holding].Fits(tensor.spec.shape))
      return DescribeMisfit(tensor, layout.holdings[tensor.holding]);
  }
  if (all_fine) return {};
  for (std::size_t h = 0; h < faults.size(); ++h)
    TB_RETURN_IF_ERROR(faults[h].Annotate(fmt::format("holding {}", h)));
  return {};
}

Status Validate(const RankLayout& layout, std::uint32_t rank) {
  TB_RETURN_IF_ERROR(CheckCounts(layout.tensors.size(), std::uint64_t{rank} + 1));
  NameCheck names(layout.tensors.size());
  for (const RankLayout::Tensor& tensor : layout.tensors) {
    Status status = names.Add(tensor.spec);
    if (!status.ok()) return status.Annotate(fmt::format("rank {}", rank));
    status = CheckBoxes(tensor.boxes, tensor.spec.shape);
    if (status.ok()) status = CheckDisjoint(tensor.boxes);
    if (!status.ok()) {
      return status.Annotate(fmt::format("tensor {}: rank {}", Quoted(tensor.spec.name), rank));
    }
  }
  return {};
}

Status LayoutCombiner::Add(const RankLayout& rank) {
  const std::uint32_t number = rank_count_++;
  index_.reserve(std::max(index_.size(), rank.tensors.size()));
  for (const RankLayout::Tensor& tensor : rank.tensors) {
    const auto known = index_.find(tensor.spec.name);
    const std::size_t at = known == index_.end() ? specs_.size() : known->second;
    if (known == index_.end()) {
      index_.emplace(specs_.emplace_back(tensor.spec).name, at);
      holdings_.emplace_back();
    } else {
      TB_RETURN_IF_ERROR(CheckSame(specs_[at], tensor.spec, number));
    }
    std::vector<RankBoxes>& held = holdings_[at].ranks;
    if (!held.empty() && held.back().rank == number) {
      return Malformed(
          fmt::format("tensor {}: rank {} names it twice", Quoted(tensor.spec.name), number));
    }
    if (!tensor.boxes.empty()) held.push_back({number, tensor.boxes});
  }
  return {};
}

Result<JobLayout> LayoutCombiner::Finish() && {
  TB_RETURN_IF_ERROR(CheckCounts(specs_.size(), rank_count_));
  JobLayout job;
  job.rank_count = rank_count_;
  job.tensors.reserve(specs_.size());
  HoldingPool pool;
  for (std::size_t t = 0; t < specs_.size(); ++t) {
    job.tensors.push_back({std::move(specs_[t]), pool.Intern(std::move(holdings_[t]))});
  }
  job.holdings = std::move(pool).Take();
  return job;
}

Hash128 HashOf(const Holding& holding) {
  Hasher hasher;
  AddHolding(hasher, holding);
  return hasher.Finish();
}

std::uint32_t HoldingPool::Intern(Holding holding) {
  const auto next = static_cast<std::uint32_t>(holdings_.size());
  const auto [at, is_new] = index_.emplace(HashOf(holding), next);
  if (is_new) {
    holdings_.push_back(std::move(holding));
    return next;
  }
  TB_CHECK(holdings_[at->second] == holding);  // 128 bits of XXH3 tell them apart
  return at->second;
}

Hash128 HashOf(const JobLayout& layout) {
  Hasher hasher;
  hasher.AddU32(layout.rank_count);
  hasher.AddU64(layout.holdings.size());
  for (const Holding& holding : layout.holdings) AddHolding(hasher, holding);
  hasher.AddU64(layout.tensors.size());
  for (const JobLayout::Tensor& tensor : layout.tensors) {
    AddSpec(hasher, tensor.spec);
    hasher.AddU32(tensor.holding);
  }
  return hasher.Finish();
}

Hash128 HashOf(const RankLayout& layout) {
  Hasher hasher;
  hasher.AddU64(layout.tensors.size());
  for (const RankLayout::Tensor& tensor : layout.tensors) {
    AddSpec(hasher, tensor.spec);
    AddBoxes(hasher, tensor.boxes);
  }
  return hasher.Finish();
}

}  // namespace tensorbus
