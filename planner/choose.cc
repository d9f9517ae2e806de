#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <tuple>

#include "planner/class_plan.h"
#include "planner/topology.h"

namespace tensorbus::planner {
namespace {

/// Parts that balance cuts off are multiples of about this size, so small boxes stay whole.
constexpr std::uint64_t kCutBytes = 64 * 1024;

/// Holder sets, numbered as they first appear.
class HolderSets {
 public:
  std::uint32_t Intern(const std::vector<std::uint32_t>& holders) {
    const auto [at, is_new] =
        numbers_.emplace(holders, static_cast<std::uint32_t>(supplies_.size()));
    if (is_new) supplies_.push_back({holders, 0});
    return at->second;
  }
  Supply& operator[](std::uint32_t set) { return supplies_[set]; }
  std::span<const Supply> supplies() const { return supplies_; }

 private:
  std::map<std::vector<std::uint32_t>, std::uint32_t> numbers_;
  std::vector<Supply> supplies_;
};

/// All tensors of a class need `cell` at `target`; any of a holder set may send it.
struct Need {
  std::uint32_t set = 0;
  std::uint32_t target = 0;
  std::uint32_t class_index = 0;
  const Cell* cell = nullptr;
};

/// How boxes of one need may be cut: along the largest dimension, in steps of whole slices.
struct CutRule {
  int dim = -1;  ///< none for a scalar
  std::uint64_t extent = 1;
  std::uint64_t slice_bytes = 0;
  std::uint64_t step = 1;  ///< slices

  CutRule(const Box& box, std::uint64_t box_bytes) : slice_bytes(box_bytes) {
    for (int d = 0; d < box.rank(); ++d) {
      if (dim >= 0 && box[d].size() <= extent) continue;
      dim = d;
      extent = box[d].size();
    }
    slice_bytes = box_bytes / extent;
    step = std::max<std::uint64_t>(1, kCutBytes / slice_bytes);
  }
  /// Slices nearest to `bytes` that may be cut off: 0, a multiple of the step, or all.
  std::uint64_t SlicesFor(std::uint64_t bytes) const {
    const std::uint64_t slices = (bytes + slice_bytes / 2) / slice_bytes;
    const std::uint64_t rounded = (slices + step / 2) / step * step;
    return std::min(rounded, extent);
  }
};

/// A place in the run of all tensors' boxes of one need.
struct Mark {
  std::uint32_t instance = 0;
  std::uint64_t slice = 0;
};

/// Deals the needs of one holder set, in order, to its holders until each has its share.
/// Consecutive needs go to one holder, so that few routes arise.
class Dealer {
 public:
  Dealer(const Supply& supply, std::span<const std::uint64_t> shares) : supply_(supply) {
    std::uint64_t sum = 0;
    for (const std::uint64_t share : shares) ends_.push_back(sum += share);
  }

  void Deal(const Need& need, TensorClass* tensor_class) {
    const Box& box = need.cell->box;
    const std::uint64_t box_bytes = box.volume() * ItemBytes(tensor_class->dtype);
    const auto count = static_cast<std::uint32_t>(tensor_class->tensors.size());
    const CutRule rule(box, box_bytes);
    Mark from;
    while (from.instance < count) {
      const Mark to = MarkAt(ends_[holder_], box_bytes, count, rule);
      Emit(need, rule, from, to, tensor_class);
      if (to.instance >= count) break;
      from = to;
      ++holder_;
    }
    at_ += box_bytes * count;
    while (holder_ + 1 < ends_.size() && ends_[holder_] <= at_) ++holder_;
  }

 private:
  /// Where a holder's share ends inside the need that starts at `at_`; its end if it reaches so far
  /// or nobody comes after.
  Mark MarkAt(std::uint64_t end, std::uint64_t box_bytes, std::uint32_t count,
              const CutRule& rule) const {
    if (holder_ + 1 == ends_.size() || end >= at_ + box_bytes * count) return {count, 0};
    if (end <= at_) return {0, 0};
    const std::uint64_t inside = end - at_;
    const auto instance = static_cast<std::uint32_t>(inside / box_bytes);
    const std::uint64_t slice = rule.SlicesFor(inside % box_bytes);
    if (slice == rule.extent) return {instance + 1, 0};
    return {instance, slice};
  }

  void Emit(const Need& need, const CutRule& rule, const Mark& from, const Mark& to,
            TensorClass* tensor_class) const {
    const auto add = [&](std::uint32_t first, std::uint32_t last, std::uint64_t lo,
                         std::uint64_t hi) {
      if (first >= last || lo >= hi) return;
      Box box = need.cell->box;
      if (rule.dim >= 0) box[rule.dim] = {box[rule.dim].lo + lo, box[rule.dim].lo + hi};
      tensor_class->transfers.push_back(
          {need.target, supply_.holders[holder_], false, box, first, last, 0});
    };
    if (from.instance == to.instance) {
      add(from.instance, from.instance + 1, from.slice, to.slice);
      return;
    }
    const bool cut_first = from.slice != 0;
    if (cut_first) add(from.instance, from.instance + 1, from.slice, rule.extent);
    add(from.instance + (cut_first ? 1 : 0), to.instance, 0, rule.extent);
    add(to.instance, to.instance + 1, 0, to.slice);
  }

  const Supply& supply_;
  std::vector<std::uint64_t> ends_;  // running sums of the shares
  std::size_t holder_ = 0;
  std::uint64_t at_ = 0;  // bytes dealt with before the current need
};

/// Collects needs, finds local ones, and chooses holders for the rest.
class Chooser {
 public:
  Chooser(const JobLayout& source, const JobLayout& target, const TopologyIndex& places,
          std::vector<TensorClass>* classes)
      : source_(source), target_(target), places_(places), classes_(*classes) {}

  Status Run(PlanFault* fault) {
    cells_.reserve(classes_.size());
    for (std::uint32_t c = 0; c < classes_.size(); ++c) TB_RETURN_IF_ERROR(Collect(c, fault));
    std::stable_sort(needs_.begin(), needs_.end(), [](const Need& a, const Need& b) {
      return std::tuple(a.set, a.target) < std::tuple(b.set, b.target);
    });
    const auto shares = Balance(sets_.supplies(), source_.rank_count);
    for (std::size_t first = 0; first < needs_.size();) {
      const std::uint32_t set = needs_[first].set;
      Dealer dealer(sets_[set], shares[set]);
      for (; first < needs_.size() && needs_[first].set == set; ++first)
        dealer.Deal(needs_[first], &classes_[needs_[first].class_index]);
    }
    for (TensorClass& c : classes_) {
      std::sort(c.transfers.begin(), c.transfers.end(), [](const Transfer& a, const Transfer& b) {
        return std::tie(a.target, a.source, a.box, a.first) <
               std::tie(b.target, b.source, b.box, b.first);
      });
    }
    return {};
  }

 private:
  Status Collect(std::uint32_t class_index, PlanFault* fault) {
    TensorClass& c = classes_[class_index];
    auto cells =
        CellsOf(source_.holdings[c.source_holding], target_.holdings[c.target_holding], fault);
    if (!cells.ok()) {
      const std::string& name = target_.tensors[c.tensors.front()].spec.name;
      if (fault != nullptr) fault->tensor = name;
      return cells.status().Annotate(fmt::format("tensor '{}'", name));
    }
    cells_.push_back(std::move(*cells));
    for (const Cell& cell : cells_.back()) {
      const std::uint32_t all = sets_.Intern(cell.holders);
      const std::uint64_t box_bytes = cell.box.volume() * ItemBytes(c.dtype);
      for (const std::uint32_t target : cell.targets) {
        std::uint32_t set = all;
        if (!places_.trivial()) {
          if (const auto local = places_.LocalHolder(cell.holders, target)) {
            const auto count = static_cast<std::uint32_t>(c.tensors.size());
            c.transfers.push_back({target, *local, true, cell.box, 0, count, 0});
            continue;
          }
          set = sets_.Intern(places_.Nearest(cell.holders, target));
        }
        TB_RETURN_IF_ERROR(AddDemand(box_bytes, c.tensors.size(), set));
        needs_.push_back({set, target, class_index, &cell});
      }
    }
    return {};
  }

  Status AddDemand(std::uint64_t box_bytes, std::uint64_t count, std::uint32_t set) {
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(box_bytes, count, &bytes) || bytes > kMaxSupplyBytes - total_) {
      return {Code::kResourceExhausted, "the plan would move more than 2^62 bytes",
              Reason::kUnsupported};
    }
    total_ += bytes;
    sets_[set].bytes += bytes;
    return {};
  }

  const JobLayout& source_;
  const JobLayout& target_;
  const TopologyIndex& places_;
  std::vector<TensorClass>& classes_;
  std::vector<std::vector<Cell>> cells_;  // by class; reserved, so that needs may point into it
  HolderSets sets_;
  std::vector<Need> needs_;
  std::uint64_t total_ = 0;
};

void AddBox(Hasher& hasher, const Box& box) {
  hasher.AddU8(static_cast<std::uint8_t>(box.rank()));
  for (const Range& range : box.ranges()) {
    hasher.AddU64(range.lo);
    hasher.AddU64(range.hi);
  }
}

/// Hashes what every agent must agree on: names, shapes, and who sends which box to whom.
Hash128 DigestOf(const JobLayout& source, const JobLayout& target,
                 std::span<const TensorClass> classes, const PlanOptions& options) {
  const std::uint32_t plan_format = options.relays ? 2 : 1;
  Hasher hasher;
  hasher.AddU32(plan_format);
  hasher.AddU32(source.rank_count);
  hasher.AddU32(target.rank_count);
  hasher.AddU64(classes.size());
  for (const TensorClass& c : classes) {
    hasher.AddU8(static_cast<std::uint8_t>(c.dtype));
    hasher.AddU8(static_cast<std::uint8_t>(c.shape.rank()));
    for (const std::uint64_t dim : c.shape.dims()) hasher.AddU64(dim);
    hasher.AddU64(c.tensors.size());
    for (const std::uint32_t t : c.tensors) {
      hasher.AddU32(t);
      hasher.AddString(target.tensors[t].spec.name);
    }
    hasher.AddU64(c.transfers.size());
    for (const Transfer& transfer : c.transfers) {
      hasher.AddU32(transfer.target);
      hasher.AddU32(transfer.source);
      hasher.AddU8(transfer.local ? 1 : 0);
      hasher.AddU32(transfer.first);
      hasher.AddU32(transfer.last);
      if (options.relays) hasher.AddU32(transfer.hop);
      AddBox(hasher, transfer.box);
    }
  }
  return hasher.Finish();
}

}  // namespace

Result<ClassPlan> BuildClassPlan(const JobLayout& source, const JobLayout& target,
                                 const Topology& topology, PlanFault* fault,
                                 const PlanOptions& options) {
  if (options.relays) {
    return Status(Code::kUnimplemented, "relays: not planned yet", Reason::kUnsupported);
  }
  TB_ASSIGN_OR_RETURN(const TopologyIndex places,
                      TopologyIndex::Create(topology, source.rank_count, target.rank_count));
  ClassPlan plan;
  TB_ASSIGN_OR_RETURN(plan.classes, Classify(source, target, fault));
  TB_RETURN_IF_ERROR(Chooser(source, target, places, &plan.classes).Run(fault));
  plan.digest = DigestOf(source, target, plan.classes, options);
  return plan;
}

}  // namespace tensorbus::planner
