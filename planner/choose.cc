#include "planner/choose.h"

#include <algorithm>
#include <fmt/format.h>
#include <numeric>
#include <string_view>
#include <tuple>

#include "planner/balance.h"
#include "planner/dealer.h"

namespace tensorbus::planner {
namespace {

/// All tensors of a class need a box at `target`; any of a supply's holders may send it.
struct Need {
  std::uint32_t supply = 0;
  std::uint32_t target = 0;
  std::uint32_t class_index = 0;
  std::uint32_t box = 0;
};

/// Collects needs, finds local ones, and chooses holders for the rest.
class Chooser {
 public:
  Chooser(const LayoutMatch& match, const TopologyIndex& places, const RankSelection& lost)
      : match_(match), places_(places), lost_(lost), holders_(match.rank_sets.size()) {}

  Result<ChosenTransfers> Run(PlanFault* fault) && {
    TB_RETURN_IF_ERROR(CheckLost("source", lost_.sources, match_.source->rank_count));
    TB_RETURN_IF_ERROR(CheckLost("target", lost_.targets, match_.target->rank_count));
    out_.by_class.resize(match_.classes.size());
    for (std::uint32_t c = 0; c < match_.classes.size(); ++c) TB_RETURN_IF_ERROR(Collect(c, fault));
    std::stable_sort(needs_.begin(), needs_.end(), [](const Need& a, const Need& b) {
      return std::tuple(a.supply, a.target) < std::tuple(b.supply, b.target);
    });
    out_.cuts_begin = static_cast<std::uint32_t>(match_.boxes.size());
    const auto shares = Balance(supplies_, match_.source->rank_count);
    for (std::size_t first = 0; first < needs_.size();) {
      const std::uint32_t supply = needs_[first].supply;
      std::vector<std::uint64_t> ends = shares[supply];
      std::partial_sum(ends.begin(), ends.end(), ends.begin());
      Dealer dealer(std::move(ends), &out_);
      for (; first < needs_.size() && needs_[first].supply == supply; ++first)
        Deal(needs_[first], &dealer);
    }
    return std::move(out_);
  }

 private:
  static Status CheckLost(std::string_view side, const std::vector<std::uint32_t>& ranks,
                          std::uint32_t count) {
    if (ranks.empty() || ranks.back() < count) return {};
    return {Code::kInvalidArgument,
            fmt::format("lost {} rank {}, the job has {} ranks", side, ranks.back(), count),
            Reason::kMalformed};
  }
  static bool Among(const std::vector<std::uint32_t>& ranks, std::uint32_t rank) {
    return std::binary_search(ranks.begin(), ranks.end(), rank);
  }

  Status Collect(std::uint32_t class_index, PlanFault* fault) {
    const TensorClass& c = match_.classes[class_index];
    const auto count = static_cast<std::uint32_t>(c.tensors.size());
    for (const Cell& cell : match_.cells[class_index]) {
      const std::uint64_t box_bytes = match_.boxes[cell.box].volume() * ItemBytes(c.dtype);
      for (const std::uint32_t target : match_.rank_sets[cell.targets]) {
        if (Among(lost_.targets, target)) continue;
        const Holders& all = HoldersOf(cell.holders);
        if (all.ranks.empty()) return AllLost(c, cell, target, fault);
        std::uint32_t supply = all.supply;
        if (!places_.trivial()) {
          if (const auto local = places_.LocalHolder(all.ranks, target)) {
            out_.by_class[class_index].push_back({target, *local, cell.box, 0, count, 0, 0, true});
            continue;
          }
          supply = SupplyOf(places_.Nearest(all.ranks, target));
        }
        TB_RETURN_IF_ERROR(AddDemand(box_bytes, count, supply));
        needs_.push_back({supply, target, class_index, cell.box});
      }
    }
    return {};
  }

  void Deal(const Need& need, Dealer* dealer) {
    const std::vector<std::uint32_t>& holders = supplies_[need.supply].holders;
    for (const Part& part :
         dealer->Deal(match_.classes[need.class_index], match_.boxes[need.box], need.box)) {
      out_.by_class[need.class_index].push_back(
          {need.target, holders[part.taker], part.box, part.first, part.last, 0, 0, false});
    }
  }

  /// The ranks of a set that are not lost, and their supply.
  struct Holders {
    bool known = false;
    std::vector<std::uint32_t> ranks;
    std::uint32_t supply = 0;
  };
  const Holders& HoldersOf(std::uint32_t set) {
    Holders& holders = holders_[set];
    if (holders.known) return holders;
    holders.known = true;
    for (const std::uint32_t rank : match_.rank_sets[set]) {
      if (!Among(lost_.sources, rank)) holders.ranks.push_back(rank);
    }
    if (!holders.ranks.empty()) holders.supply = SupplyOf(holders.ranks);
    return holders;
  }

  Status AllLost(const TensorClass& c, const Cell& cell, std::uint32_t target,
                 PlanFault* fault) const {
    const std::string& name = match_.target->tensors[c.tensors.front()].spec.name;
    const Box& box = match_.boxes[cell.box];
    if (fault != nullptr) {
      *fault = {};
      fault->tensor = name;
      fault->rank = target;
      fault->box = box;
    }
    return {Code::kFailedPrecondition,
            fmt::format("tensor '{}': target rank {} needs box {}, which only lost source ranks "
                        "held: {}",
                        name, target, box.ToString(),
                        fmt::join(match_.rank_sets[cell.holders], ", ")),
            Reason::kNoHolder};
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
  const RankSelection& lost_;
  std::vector<Holders> holders_;  // by set of ranks
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
                                      const RankSelection& lost, PlanFault* fault) {
  return Chooser(match, places, lost).Run(fault);
}

}  // namespace tensorbus::planner
