#include "planner/choose.h"

#include <algorithm>
#include <tuple>

#include "planner/balance.h"

namespace tensorbus::planner {
namespace {

/// Parts that balance cuts off are multiples of about this size, so small boxes stay whole.
constexpr std::uint64_t kCutBytes = 64 * 1024;

/// All tensors of a class need a box at `target`; any of a supply's holders may send it.
struct Need {
  std::uint32_t supply = 0;
  std::uint32_t target = 0;
  std::uint32_t class_index = 0;
  std::uint32_t box = 0;
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

/// Deals the needs of one supply, in order, to its holders until each has its share. Consecutive
/// needs go to one holder, so that few routes arise.
class Dealer {
 public:
  Dealer(const Supply& supply, std::span<const std::uint64_t> shares, ChosenTransfers* out)
      : supply_(supply), out_(*out) {
    std::uint64_t sum = 0;
    for (const std::uint64_t share : shares) ends_.push_back(sum += share);
  }

  void Deal(const Need& need, const Box& box, const TensorClass& tensor_class) {
    const std::uint64_t box_bytes = box.volume() * ItemBytes(tensor_class.dtype);
    const auto count = static_cast<std::uint32_t>(tensor_class.tensors.size());
    const CutRule rule(box, box_bytes);
    Mark from;
    while (from.instance < count) {
      const Mark to = MarkAt(ends_[holder_], box_bytes, count, rule);
      Emit(need, box, rule, from, to);
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

  void Emit(const Need& need, const Box& box, const CutRule& rule, const Mark& from,
            const Mark& to) {
    const auto add = [&](std::uint32_t first, std::uint32_t last, std::uint64_t lo,
                         std::uint64_t hi) {
      if (first >= last || lo >= hi) return;
      Transfer transfer;
      transfer.target = need.target;
      transfer.source = supply_.holders[holder_];
      transfer.box = hi - lo == rule.extent ? need.box : out_.Cut(box, rule.dim, lo, hi);
      transfer.first = first;
      transfer.last = last;
      out_.by_class[need.class_index].push_back(transfer);
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
  ChosenTransfers& out_;
  std::vector<std::uint64_t> ends_;  // running sums of the shares
  std::size_t holder_ = 0;
  std::uint64_t at_ = 0;  // bytes dealt with before the current need
};

/// Collects needs, finds local ones, and chooses holders for the rest.
class Chooser {
 public:
  Chooser(const LayoutMatch& match, const TopologyIndex& places, std::uint32_t source_count)
      : match_(match), places_(places), source_count_(source_count) {}

  Result<ChosenTransfers> Run() && {
    out_.by_class.resize(match_.classes.size());
    for (std::uint32_t c = 0; c < match_.classes.size(); ++c) TB_RETURN_IF_ERROR(Collect(c));
    std::stable_sort(needs_.begin(), needs_.end(), [](const Need& a, const Need& b) {
      return std::tuple(a.supply, a.target) < std::tuple(b.supply, b.target);
    });
    out_.cuts_begin = static_cast<std::uint32_t>(match_.boxes.size());
    const auto shares = Balance(supplies_, source_count_);
    for (std::size_t first = 0; first < needs_.size();) {
      const std::uint32_t supply = needs_[first].supply;
      Dealer dealer(supplies_[supply], shares[supply], &out_);
      for (; first < needs_.size() && needs_[first].supply == supply; ++first) {
        const Need& need = needs_[first];
        dealer.Deal(need, match_.boxes[need.box], match_.classes[need.class_index]);
      }
    }
    return std::move(out_);
  }

 private:
  Status Collect(std::uint32_t class_index) {
    const TensorClass& c = match_.classes[class_index];
    const auto count = static_cast<std::uint32_t>(c.tensors.size());
    for (const Cell& cell : match_.cells[class_index]) {
      const std::vector<std::uint32_t>& holders = match_.rank_sets[cell.holders];
      const std::uint32_t all = SupplyOf(holders);
      const std::uint64_t box_bytes = match_.boxes[cell.box].volume() * ItemBytes(c.dtype);
      for (const std::uint32_t target : match_.rank_sets[cell.targets]) {
        std::uint32_t supply = all;
        if (!places_.trivial()) {
          if (const auto local = places_.LocalHolder(holders, target)) {
            out_.by_class[class_index].push_back({target, *local, cell.box, 0, count, 0, 0, true});
            continue;
          }
          supply = SupplyOf(places_.Nearest(holders, target));
        }
        TB_RETURN_IF_ERROR(AddDemand(box_bytes, count, supply));
        needs_.push_back({supply, target, class_index, cell.box});
      }
    }
    return {};
  }

  /// Supplies are numbered as they first appear.
  std::uint32_t SupplyOf(const std::vector<std::uint32_t>& holders) {
    const std::uint32_t number = supply_numbers_.Add(holders);
    if (number == supplies_.size()) supplies_.push_back({holders, 0});
    return number;
  }

  Status AddDemand(std::uint64_t box_bytes, std::uint64_t count, std::uint32_t supply) {
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(box_bytes, count, &bytes) || bytes > kMaxSupplyBytes - total_) {
      return {Code::kResourceExhausted, "the plan would move more than 2^62 bytes",
              Reason::kUnsupported};
    }
    total_ += bytes;
    supplies_[supply].bytes += bytes;
    return {};
  }

  const LayoutMatch& match_;
  const TopologyIndex& places_;
  std::uint32_t source_count_;
  RankSets supply_numbers_;
  std::vector<Supply> supplies_;
  std::vector<Need> needs_;
  std::uint64_t total_ = 0;
  ChosenTransfers out_;
};

}  // namespace

std::uint32_t ChosenTransfers::Cut(const Box& box, int dim, std::uint64_t lo, std::uint64_t hi) {
  Box part = box;
  part[dim] = {box[dim].lo + lo, box[dim].lo + hi};
  cuts.push_back(part);
  return cuts_begin + static_cast<std::uint32_t>(cuts.size() - 1);
}

Result<ChosenTransfers> ChooseHolders(const LayoutMatch& match, const TopologyIndex& places,
                                      std::uint32_t source_count) {
  return Chooser(match, places, source_count).Run();
}

}  // namespace tensorbus::planner
