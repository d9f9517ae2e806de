#include "tensorbus/daemon/coverage.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <span>
#include <unordered_set>

#include "planner/regions.h"
#include "planner/tiling.h"
#include "tensorbus/types/dtype.h"

namespace tensorbus::daemon {

namespace {

constexpr std::size_t kListedNames = 5;
/// Names compared when looking for near misses; more would take noticeable time.
constexpr std::size_t kComparedNames = 20000;

/// Levenshtein distance, given up (as limit + 1) once it exceeds `limit`.
std::size_t Distance(std::string_view a, std::string_view b, std::size_t limit) {
  if (a.size() > b.size() + limit || b.size() > a.size() + limit) return limit + 1;
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j < row.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    std::size_t best = row[0];
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
      best = std::min(best, row[j]);
    }
    if (best > limit) return limit + 1;
  }
  return row.back();
}

Status UnknownTensor(const JobLayout& manifest, std::string_view who, std::string_view does,
                     const std::string& name) {
  const auto near = NearestNames(manifest, name, 3);
  const std::string hint = near.empty() ? fmt::format("it has {} tensors, none with a similar name",
                                                      manifest.tensors.size())
                                        : fmt::format("nearest names: {}", fmt::join(near, ", "));
  return {Code::kFailedPrecondition,
          fmt::format("{} {} tensor \"{}\", which the channel does not have; {}", who, does, name,
                      hint),
          Reason::kUnknownTensor};
}

/// A tensor as a rank registered it, against the channel's.
Status CheckTensor(const TensorIndex& manifest, const TensorSpec& asked, std::string_view who) {
  const JobLayout::Tensor* const known = manifest.Find(asked.name);
  if (known == nullptr) return UnknownTensor(manifest.layout(), who, "asks for", asked.name);
  const TensorSpec& spec = known->spec;
  if (spec.dtype != asked.dtype) {
    return {Code::kFailedPrecondition,
            fmt::format("{} registered tensor \"{}\" as {}, the channel has it as {}; register it "
                        "as {}",
                        who, spec.name, DTypeName(asked.dtype), DTypeName(spec.dtype),
                        DTypeName(spec.dtype)),
            Reason::kDtypeMismatch};
  }
  if (spec.shape != asked.shape) {
    return {Code::kFailedPrecondition,
            fmt::format("{} registered tensor \"{}\" with the global shape {}, the channel has {}; "
                        "check the placement and whether the shard's own shape was given",
                        who, spec.name, asked.shape.ToString(), spec.shape.ToString()),
            Reason::kLayoutMismatch};
  }
  return {};
}

Status CheckLeaveOut(const TensorIndex& manifest, const RankClaim& claim) {
  for (const std::string& name : claim.leave_out) {
    if (manifest.Find(name) == nullptr) {
      return UnknownTensor(manifest.layout(), claim.who, "leaves out", name);
    }
  }
  return {};
}

/// The box from the first missing element (in row-major order) to where something is held again,
/// dimension by dimension from the last.
Box MissingBox(const Box& whole, std::span<const Box> held) {
  const planner::TilingFault fault = planner::FirstTilingFault(whole, held);
  Box missing = whole;
  for (int d = 0; d < whole.rank(); ++d) {
    missing[d].lo = fault.at[static_cast<std::size_t>(d)];
    missing[d].hi = missing[d].lo + 1;
  }
  for (int d = whole.rank() - 1; d >= 0; --d) {
    Box longer = missing;
    longer[d].hi = whole[d].hi;
    for (const Box& box : held) {
      if (Intersect(longer, box)) longer[d].hi = std::min(longer[d].hi, box[d].lo);
    }
    missing = longer;
  }
  return missing;
}

/// Whether what all ranks hold of a tensor is all of it; else the error.
Status CheckWhole(const TensorSpec& spec, const Holding& holding,
                  const std::vector<RankClaim>& ranks, std::string_view who) {
  TB_ASSIGN_OR_RETURN(const std::vector<planner::Region> regions, planner::RegionsOf(holding));
  std::vector<Box> held;
  held.reserve(regions.size());
  for (const planner::Region& region : regions) held.push_back(region.box);
  const Box whole = Box::Whole(spec.shape);
  if (whole.empty() || planner::TilingCheck().Exact(whole, held)) return {};
  std::vector<std::string> holders;
  for (const RankBoxes& rank : holding.ranks) {
    if (holders.size() == kListedNames) {
      holders.emplace_back("…");
      break;
    }
    holders.push_back(fmt::format("{} holds {}{}", ranks[rank.rank].who, rank.boxes[0].ToString(),
                                  rank.boxes.size() > 1 ? " and more" : ""));
  }
  return {
      Code::kFailedPrecondition,
      fmt::format("{} holds tensor \"{}\" in part: no rank registered its box {} ({}); register "
                  "that box on one of the ranks, or name the tensor in leave_out to take only "
                  "a part of it on purpose",
                  who, spec.name, MissingBox(whole, held).ToString(), fmt::join(holders, ", ")),
      Reason::kLayoutMismatch};
}

}  // namespace

std::vector<std::string> NearestNames(const JobLayout& manifest, std::string_view name,
                                      std::size_t limit) {
  const std::size_t reach = std::max<std::size_t>(2, name.size() / 3);
  std::vector<std::pair<std::size_t, std::string_view>> near;
  const std::size_t count = std::min(manifest.tensors.size(), kComparedNames);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string& candidate = manifest.tensors[i].spec.name;
    const bool inside = candidate.find(name) != std::string::npos ||
                        (!candidate.empty() && name.find(candidate) != std::string_view::npos);
    const std::size_t distance = inside ? 1 : Distance(candidate, name, reach);
    if (distance <= reach) near.emplace_back(distance, candidate);
  }
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> out;
  for (std::size_t i = 0; i < near.size() && i < limit; ++i) out.emplace_back(near[i].second);
  return out;
}

TensorIndex::TensorIndex(const JobLayout& layout) : layout_(layout) {
  index_.reserve(layout.tensors.size());
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    index_.emplace(layout.tensors[i].spec.name, static_cast<std::uint32_t>(i));
  }
}

const JobLayout::Tensor* TensorIndex::Find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &layout_.tensors[found->second];
}

Status CheckRankFits(const TensorIndex& manifest, const RankLayout& rank, const RankClaim& claim) {
  for (const RankLayout::Tensor& tensor : rank.tensors) {
    TB_RETURN_IF_ERROR(CheckTensor(manifest, tensor.spec, claim.who));
  }
  return CheckLeaveOut(manifest, claim);
}

Status CheckReplicaFits(const TensorIndex& manifest, const JobLayout& replica,
                        const std::vector<RankClaim>& ranks, std::string_view who) {
  std::unordered_set<std::string_view> left_out;
  for (const RankClaim& claim : ranks) {
    TB_RETURN_IF_ERROR(CheckLeaveOut(manifest, claim));
    left_out.insert(claim.leave_out.begin(), claim.leave_out.end());
  }
  std::unordered_set<std::string_view> handled = left_out;
  // Tensors of a class share shape and holding: each pair is looked at once.
  std::map<std::uint32_t, std::vector<Shape>> whole;
  for (const JobLayout::Tensor& tensor : replica.tensors) {
    const Holding& holding = replica.HoldingOf(tensor);
    const std::string_view holder =
        holding.ranks.empty() ? who : std::string_view(ranks[holding.ranks[0].rank].who);
    TB_RETURN_IF_ERROR(CheckTensor(manifest, tensor.spec, holder));
    if (holding.ranks.empty()) continue;
    handled.insert(tensor.spec.name);
    if (left_out.contains(tensor.spec.name)) continue;
    std::vector<Shape>& shapes = whole[tensor.holding];
    if (std::find(shapes.begin(), shapes.end(), tensor.spec.shape) != shapes.end()) continue;
    TB_RETURN_IF_ERROR(CheckWhole(tensor.spec, holding, ranks, who));
    shapes.push_back(tensor.spec.shape);
  }
  std::vector<std::string_view> missing;
  std::size_t count = 0;
  for (const JobLayout::Tensor& tensor : manifest.layout().tensors) {
    // An empty tensor has nothing that could be held.
    if (handled.contains(tensor.spec.name) || Box::Whole(tensor.spec.shape).empty()) continue;
    if (++count <= kListedNames) missing.emplace_back(tensor.spec.name);
  }
  if (count == 0) return {};
  return {Code::kFailedPrecondition,
          fmt::format("{} holds {} tensors of the channel on no rank and does not leave them out: "
                      "{}{}; register them or name them in leave_out",
                      who, count, fmt::join(missing, ", "), count > missing.size() ? ", …" : ""),
          Reason::kLayoutMismatch};
}

}  // namespace tensorbus::daemon
