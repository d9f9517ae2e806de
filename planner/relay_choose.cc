#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <numeric>
#include <optional>
#include <span>

#include "planner/balance.h"
#include "planner/choose.h"
#include "planner/dealer.h"
#include "planner/even_out.h"
#include "planner/order_balance.h"
#include "planner/relay_trees.h"
#include "planner/survivors.h"

namespace tensorbus::planner {
namespace {

using Ranks = std::vector<std::uint32_t>;

/// All tensors of a class need a box at all targets of a group.
struct GroupNeed {
  std::uint32_t class_index = 0;
  std::uint32_t box = 0;
};

/// What any of the same holders may send along the same trees.
struct Group {
  bool near = false;         ///< its holders are on the node that comes first
  std::uint32_t supply = 0;  ///< among those that are near, or those that are not
  std::size_t target_count = 0;
  RelayTrees trees;
  std::uint64_t bytes = 0;
  std::vector<GroupNeed> needs;
};

/// How what some ranks hold gets to some targets.
struct Delivery {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> local;  // target, and source on its device
  std::vector<std::size_t> groups;  // one for each node that has holders, else one
};

/// Whatever groups take from holders over one kind of port.
struct Supplies {
  RankSets numbers;  ///< by holders
  std::vector<Supply> list;
  std::vector<std::uint64_t> dealt;  ///< bytes of each that groups have got so far
};

/// A holder and a tree: who gets one interval of the line of a group's bytes.
struct Way {
  std::uint64_t end = 0;
  std::uint32_t holder = 0;
  std::size_t tree = 0;
};

/// What each tree carries: equal parts of its order's share.
std::vector<std::uint64_t> BytesByTree(const RelayTrees& trees,
                                       std::span<const std::uint64_t> by_order) {
  const std::uint64_t starts = trees.starts();
  std::vector<std::uint64_t> bytes;
  for (const std::uint64_t share : by_order) {
    for (std::uint64_t start = 0; start < starts; ++start) {
      // The same as the difference of share * start / starts, which might overflow.
      bytes.push_back(share / starts + share % starts * (start + 1) / starts -
                      share % starts * start / starts);
    }
  }
  return bytes;
}

/// Cuts the line of a group's bytes, [begin, begin + bytes) of its supply, where a holder's share
/// ends and into intervals for its trees. `turn`: the tree that begins. What is too small to be cut
/// falls to the last, so groups begin at different ones.
std::vector<Way> WaysOf(const Group& group, std::size_t turn,
                        std::span<const std::uint64_t> tree_bytes, std::uint64_t begin,
                        const Ranks& holders, std::span<const std::uint64_t> holder_ends) {
  const std::size_t trees = group.trees.count();
  std::vector<Way> ways;
  std::size_t holder = 0;
  while (holder + 1 < holders.size() && holder_ends[holder] <= begin) ++holder;
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < trees; ++i) {
    const std::size_t tree = (turn + i) % trees;
    end += tree_bytes[tree];
    while (holder + 1 < holders.size() && holder_ends[holder] < begin + end) {
      ways.push_back({holder_ends[holder] - begin, holders[holder], tree});
      ++holder;
    }
    ways.push_back({end, holders[holder], tree});
  }
  return ways;
}

class RelayChooser {
 public:
  RelayChooser(const LayoutMatch& match, const TopologyIndex& places, Survivors survivors)
      : match_(match),
        places_(places),
        survivors_(std::move(survivors)),
        even_(match.source->rank_count),
        out_(match.classes.size(), match.boxes.size()) {}

  Result<ChosenPaths> Run(PlanFault* fault) && {
    for (std::uint32_t c = 0; c < match_.classes.size(); ++c) TB_RETURN_IF_ERROR(Collect(c, fault));
    TB_RETURN_IF_ERROR(DealAll());
    return std::move(out_);
  }

 private:
  Status Collect(std::uint32_t class_index, PlanFault* fault) {
    const TensorClass& c = match_.classes[class_index];
    const auto count = static_cast<std::uint32_t>(c.tensors.size());
    for (const Cell& cell : match_.cells[class_index]) {
      const Ranks& targets = survivors_.TargetsOf(cell.targets);
      if (targets.empty()) continue;
      if (survivors_.SourcesOf(cell.holders).empty())
        return OnlyLostHold(match_, c, cell, targets.front(), fault);
      const Delivery& delivery = DeliveryOf(cell);
      for (const auto& [target, source] : delivery.local)
        out_.by_class[class_index].push_back(
            {cell.box, 0, count, out_.Direct({target, source, 0, true})});
      const std::uint64_t box_bytes = match_.boxes[cell.box].volume() * ItemBytes(c.dtype);
      for (const std::size_t g : delivery.groups) {
        TB_ASSIGN_OR_RETURN(const std::uint64_t bytes, JoinSupplies(box_bytes, count, &total_));
        Group& group = groups_[g];
        group.bytes += bytes;
        (group.near ? near_ : far_).list[group.supply].bytes += bytes;
        group.needs.push_back({class_index, cell.box});
      }
    }
    return {};
  }

  /// Cells with the same holders and targets are delivered alike.
  const Delivery& DeliveryOf(const Cell& cell) {
    const auto [at, is_new] = deliveries_.try_emplace({cell.holders, cell.targets});
    if (is_new) {
      at->second = MakeDelivery(survivors_.SourcesOf(cell.holders), match_.rank_sets[cell.targets]);
    }
    return at->second;
  }

  bool Lost(std::uint32_t target) const {
    const Ranks& lost = survivors_.lost_targets();
    return std::binary_search(lost.begin(), lost.end(), target);
  }

  /// A node that has holders takes the bytes from these. The others get them one from the other,
  /// the first from one of those nodes; if there is none, from any holder. Some targets may be
  /// lost.
  Delivery MakeDelivery(const Ranks& holders, const Ranks& targets) {
    Delivery delivery;
    std::map<std::uint32_t, Ranks> with_holders;  // by node: its targets
    std::map<std::uint32_t, Ranks> others;
    for (const std::uint32_t target : targets) {
      if (const auto local = places_.LocalHolder(holders, target)) {
        if (!Lost(target)) delivery.local.emplace_back(target, *local);
        continue;
      }
      const bool near = !places_.OnNode(holders, target).empty();
      (near ? with_holders : others)[places_.NodeOf(target)].push_back(target);
    }
    for (auto* nodes : {&with_holders, &others}) {
      std::erase_if(*nodes, [&](const auto& node) {
        return std::all_of(node.second.begin(), node.second.end(),
                           [&](std::uint32_t target) { return Lost(target); });
      });
    }
    std::vector<Ranks> rest;
    for (auto& [node, ranks] : others) rest.push_back(std::move(ranks));
    if (with_holders.empty()) {
      if (!rest.empty()) delivery.groups.push_back(AddGroup(holders, std::move(rest), false));
      return delivery;
    }
    std::size_t until_carrier = deliveries_.size() % with_holders.size();  // they take turns
    for (auto& [node, ranks] : with_holders) {
      const Ranks near = places_.OnNode(holders, ranks.front());
      std::vector<Ranks> nodes = {std::move(ranks)};
      if (until_carrier-- == 0) nodes.insert(nodes.end(), rest.begin(), rest.end());
      delivery.groups.push_back(AddGroup(near, std::move(nodes), true));
    }
    return delivery;
  }

  std::size_t AddGroup(const Ranks& holders, std::vector<Ranks> nodes, bool root_first) {
    Supplies& supplies = root_first ? near_ : far_;
    const std::uint32_t supply = supplies.numbers.Add(holders);
    if (supply == supplies.list.size()) supplies.list.push_back({holders, 0});
    RelayTrees trees(std::move(nodes), root_first, survivors_.lost_targets());
    std::size_t targets = 0;
    for (const Ranks& ranks : trees.nodes()) targets += ranks.size();
    groups_.push_back({root_first, supply, targets, std::move(trees), 0, {}});
    return groups_.size() - 1;
  }

  Status DealAll() {
    const NodeShares shares = BalanceByNode(far_.list, near_.list, match_.source->rank_count);
    NodeShares ends = shares;
    for (auto* side : {&ends.far, &ends.near}) {
      for (auto& sums : *side) std::partial_sum(sums.begin(), sums.end(), sums.begin());
    }
    far_.dealt.resize(far_.list.size());
    near_.dealt.resize(near_.list.size());
    OrderBalance orders(match_.target->rank_count);
    for (const Group& group : groups_) orders.CountRoot(group.trees, group.bytes);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const Group& group = groups_[g];
      Supplies& supplies = group.near ? near_ : far_;
      std::uint64_t& dealt = supplies.dealt[group.supply];
      const std::vector<std::uint64_t> tree_bytes =
          BytesByTree(group.trees, orders.Share(group.trees, group.bytes));
      TB_RETURN_IF_ERROR(
          Deal(group, WaysOf(group, g, tree_bytes, dealt, supplies.list[group.supply].holders,
                             (group.near ? ends.near : ends.far)[group.supply])));
      dealt += group.bytes;
    }
    even_.Run(far_.list, near_.list, shares, &out_);
    return {};
  }

  Status Deal(const Group& group, const std::vector<Way>& ways) {
    std::vector<std::uint64_t> ends;
    for (const Way& way : ways) ends.push_back(way.end);
    Dealer dealer(std::move(ends), &out_);
    std::vector<std::optional<std::uint32_t>> paths(ways.size());  // of those that get something
    for (const GroupNeed& need : group.needs) {
      std::vector<Passage>& passages = out_.by_class[need.class_index];
      for (const Part& part :
           dealer.Deal(match_.classes[need.class_index], match_.boxes[need.box], need.box)) {
        copies_ += group.target_count;
        if (copies_ > kMaxPlanParts) return TooManyCopies();
        std::optional<std::uint32_t>& path = paths[part.taker];
        if (!path) path = AddPath(group.trees, ways[part.taker]);
        even_.Add({need.class_index, static_cast<std::uint32_t>(passages.size()), group.supply,
                   ways[part.taker].holder, part.bytes, group.near});
        passages.push_back({part.box, part.first, part.last, *path});
      }
    }
    return {};
  }

  std::uint32_t AddPath(const RelayTrees& trees, const Way& way) {
    std::vector<RouteKey> along;
    for (const RelayStep& step : trees.Steps(way.tree))
      along.push_back({step.target, step.hop == 0 ? way.holder : step.sender, step.hop, false});
    return out_.AddPath(along);
  }

  static Status TooManyCopies() {
    return {Code::kResourceExhausted,
            fmt::format("relays would cut what these targets need into more than {} parts; plan "
                        "without relays",
                        kMaxPlanParts),
            Reason::kUnsupported};
  }

  const LayoutMatch& match_;
  const TopologyIndex& places_;
  Survivors survivors_;
  /// By sets of holders and targets.
  std::map<std::pair<std::uint32_t, std::uint32_t>, Delivery> deliveries_;
  Supplies far_;
  Supplies near_;
  std::vector<Group> groups_;
  std::uint64_t total_ = 0;
  std::uint64_t copies_ = 0;  // made by trees, of a run of tensors each
  EvenOut even_;
  ChosenPaths out_;
};

}  // namespace

Result<ChosenPaths> ChooseRelays(const LayoutMatch& match, const TopologyIndex& places,
                                 const RankSelection& lost, PlanFault* fault) {
  TB_ASSIGN_OR_RETURN(Survivors survivors, Survivors::Create(match, lost));
  return RelayChooser(match, places, std::move(survivors)).Run(fault);
}

}  // namespace tensorbus::planner
