#include "planner/choose.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>

#include "planner/balance.h"
#include "planner/dealer.h"
#include "planner/even_out.h"
#include "planner/survivors.h"

namespace tensorbus::planner {
namespace {

/// All tensors of a class need a box at `target`; any of a supply's holders may send it.
struct Need {
  std::uint32_t supply = 0;
  std::uint32_t target = 0;
  std::uint32_t class_index = 0;
  std::uint32_t box = 0;
};

/// Needs that are met over one kind of port.
struct Demand {
  RankSets numbers;  ///< of the supplies, by holders; numbered as they first appear
  std::vector<Supply> supplies;
  std::vector<Need> needs;

  std::uint32_t SupplyOf(const std::vector<std::uint32_t>& holders) {
    const std::uint32_t number = numbers.Add(holders);
    if (number == supplies.size()) supplies.push_back({holders, 0});
    return number;
  }
};

/// Collects needs, finds local ones, and chooses holders for the rest.
class Chooser {
 public:
  Chooser(const LayoutMatch& match, const TopologyIndex& places, Survivors survivors)
      : match_(match),
        places_(places),
        survivors_(std::move(survivors)),
        far_supply_of_(match.rank_sets.size()),
        even_(match.source->rank_count),
        out_(match.classes.size(), match.boxes.size()) {}

  Result<ChosenPaths> Run(PlanFault* fault) && {
    for (std::uint32_t c = 0; c < match_.classes.size(); ++c) TB_RETURN_IF_ERROR(Collect(c, fault));
    const NodeShares shares =
        BalanceByNode(far_.supplies, near_.supplies, match_.source->rank_count);
    DealAll(shares.far, false, &far_);
    DealAll(shares.near, true, &near_);
    even_.Run(far_.supplies, near_.supplies, shares, &out_);
    return std::move(out_);
  }

 private:
  Status Collect(std::uint32_t class_index, PlanFault* fault) {
    const TensorClass& c = match_.classes[class_index];
    const auto count = static_cast<std::uint32_t>(c.tensors.size());
    for (const Cell& cell : match_.cells[class_index]) {
      const std::uint64_t box_bytes = match_.boxes[cell.box].volume() * ItemBytes(c.dtype);
      const std::vector<std::uint32_t>& holders = survivors_.SourcesOf(cell.holders);
      for (const std::uint32_t target : survivors_.TargetsOf(cell.targets)) {
        if (holders.empty()) return OnlyLostHold(match_, c, cell, target, fault);
        if (const auto local = places_.LocalHolder(holders, target)) {
          out_.by_class[class_index].push_back(
              {cell.box, 0, count, out_.Direct({target, *local, 0, true})});
          continue;
        }
        const std::vector<std::uint32_t> near = places_.OnNode(holders, target);
        Demand& demand = near.empty() ? far_ : near_;
        const std::uint32_t supply =
            near.empty() ? FarSupplyOf(cell.holders) : near_.SupplyOf(near);
        TB_ASSIGN_OR_RETURN(const std::uint64_t bytes, JoinSupplies(box_bytes, count, &total_));
        demand.supplies[supply].bytes += bytes;
        demand.needs.push_back({supply, target, class_index, cell.box});
      }
    }
    return {};
  }

  void DealAll(std::span<const std::vector<std::uint64_t>> shares, bool near, Demand* demand) {
    std::vector<Need>& needs = demand->needs;
    std::stable_sort(needs.begin(), needs.end(), [](const Need& a, const Need& b) {
      return std::tuple(a.supply, a.target) < std::tuple(b.supply, b.target);
    });
    for (std::size_t first = 0; first < needs.size();) {
      const std::uint32_t supply = needs[first].supply;
      std::vector<std::uint64_t> ends = shares[supply];
      std::partial_sum(ends.begin(), ends.end(), ends.begin());
      Dealer dealer(std::move(ends), &out_);
      for (; first < needs.size() && needs[first].supply == supply; ++first)
        Deal(needs[first], near, demand->supplies[supply].holders, &dealer);
    }
  }

  void Deal(const Need& need, bool near, const std::vector<std::uint32_t>& holders,
            Dealer* dealer) {
    const TensorClass& c = match_.classes[need.class_index];
    std::vector<Passage>& passages = out_.by_class[need.class_index];
    for (const Part& part : dealer->Deal(c, match_.boxes[need.box], need.box)) {
      const std::uint32_t source = holders[part.taker];
      even_.Add({need.class_index, static_cast<std::uint32_t>(passages.size()), need.supply, source,
                 part.bytes, near});
      passages.push_back(
          {part.box, part.first, part.last, out_.Direct({need.target, source, 0, false})});
    }
  }

  /// What any of the set's ranks may send from afar.
  std::uint32_t FarSupplyOf(std::uint32_t set) {
    std::optional<std::uint32_t>& supply = far_supply_of_[set];
    if (!supply) supply = far_.SupplyOf(survivors_.SourcesOf(set));
    return *supply;
  }

  const LayoutMatch& match_;
  const TopologyIndex& places_;
  Survivors survivors_;
  Demand far_;
  Demand near_;                                              // by holders on the target's node
  std::vector<std::optional<std::uint32_t>> far_supply_of_;  // by set of ranks
  std::uint64_t total_ = 0;
  EvenOut even_;
  ChosenPaths out_;
};

}  // namespace

std::uint32_t ChosenPaths::Cut(const Box& box, int dim, std::uint64_t lo, std::uint64_t hi) {
  Box part = box;
  part[dim] = {box[dim].lo + lo, box[dim].lo + hi};
  cuts.push_back(part);
  return cuts_begin + static_cast<std::uint32_t>(cuts.size() - 1);
}

std::uint32_t ChosenPaths::AddPath(std::span<const RouteKey> along) {
  for (const RouteKey& key : along) paths.routes.push_back(routes.Add(key));
  return paths.Close();
}

std::uint32_t ChosenPaths::Direct(const RouteKey& key) {
  constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  const std::uint32_t route = routes.Add(key);
  if (route >= direct_.size()) direct_.resize(route + 1, kNone);
  if (direct_[route] == kNone) direct_[route] = AddPath(std::span(&key, 1));
  return direct_[route];
}

bool ChosenPaths::HasRouteFrom(std::uint32_t source, std::uint32_t path) const {
  RouteKey key = routes[paths[path].front()];
  key.source = source;
  return routes.Has(key);
}

std::uint32_t ChosenPaths::FromAnother(std::uint32_t path, std::uint32_t source) {
  std::vector<RouteKey> along;
  for (const std::uint32_t route : paths[path]) along.push_back(routes[route]);
  along.front().source = source;
  return along.size() == 1 ? Direct(along.front()) : AddPath(along);
}

Result<ChosenPaths> ChooseHolders(const LayoutMatch& match, const TopologyIndex& places,
                                  const RankSelection& lost, PlanFault* fault) {
  TB_ASSIGN_OR_RETURN(Survivors survivors, Survivors::Create(match, lost));
  return Chooser(match, places, std::move(survivors)).Run(fault);
}

}  // namespace tensorbus::planner
