#include "planner/plan.h"

#include <algorithm>
#include <tuple>

#include "planner/class_plan.h"
#include "planner/rounds.h"

namespace tensorbus::planner {
namespace {

/// Tells routes apart, in their order in the plan.
struct RouteKey {
  std::uint32_t target;
  bool relayed;
  std::uint32_t source;
  std::uint32_t hop;

  explicit RouteKey(const Transfer& t)
      : target(t.target), relayed(t.hop > 0), source(t.source), hop(t.hop) {}
  auto operator<=>(const RouteKey&) const = default;
};

/// A transfer as it applies to one tensor: an op not yet written out.
struct Entry {
  std::uint32_t tensor;
  const Transfer* transfer;
};

/// Writes a class plan out, route by route, each in tensor order, by counting instead of sorting.
class Materializer {
 public:
  Materializer(const ClassPlan& classes, std::size_t tensor_count)
      : classes_(classes.classes), class_of_(tensor_count) {
    for (std::uint32_t c = 0; c < classes_.size(); ++c) {
      for (const std::uint32_t t : classes_[c].tensors) class_of_[t] = c;
    }
  }

  Plan Run() && {
    FindRoutes();
    PlaceEntries();
    WriteOps();
    NumberRounds();
    return std::move(plan_);
  }

 private:
  void FindRoutes() {
    for (const TensorClass& c : classes_) {
      for (const Transfer& t : c.transfers) keys_.emplace_back(t);
    }
    std::sort(keys_.begin(), keys_.end());
    keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
    plan_.routes.resize(keys_.size());
    for (const TensorClass& c : classes_) {
      auto& routes = routes_.emplace_back();
      for (const Transfer& t : c.transfers) {
        const std::uint32_t r = RouteOf(t);
        routes.push_back(r);
        Route& route = plan_.routes[r];
        route.source = t.source;
        route.target = t.target;
        route.local = t.local;
        route.relayed = t.hop > 0;
        route.op_count += t.last - t.first;
        route.bytes += t.box.volume() * ItemBytes(c.dtype) * (t.last - t.first);
      }
    }
    std::uint64_t first = 0;
    for (Route& route : plan_.routes) {
      route.first_op = first;
      first += route.op_count;
    }
    entries_.resize(first);
  }

  std::uint32_t RouteOf(const Transfer& t) const {
    const auto at = std::lower_bound(keys_.begin(), keys_.end(), RouteKey(t));
    return static_cast<std::uint32_t>(at - keys_.begin());
  }

  /// Goes through the tensors in order, so every route gets its entries in order.
  void PlaceEntries() {
    std::vector<std::uint64_t> next;
    for (const Route& route : plan_.routes) next.push_back(route.first_op);
    std::vector<Cursor> cursors(classes_.size());
    for (std::uint32_t tensor = 0; tensor < class_of_.size(); ++tensor) {
      const std::uint32_t c = class_of_[tensor];
      Cursor& cursor = cursors[c];
      if (cursor.instance == cursor.until) Renew(c, &cursor);
      ++cursor.instance;
      for (const std::uint32_t i : cursor.active)
        entries_[next[routes_[c][i]]++] = {tensor, &classes_[c].transfers[i]};
    }
  }

  /// Which transfers of a class apply to its next tensors, up to `until`.
  struct Cursor {
    std::uint32_t instance = 0;
    std::uint32_t until = 0;
    std::vector<std::uint32_t> active;
  };

  void Renew(std::uint32_t c, Cursor* cursor) const {
    const std::vector<Transfer>& transfers = classes_[c].transfers;
    cursor->until = static_cast<std::uint32_t>(classes_[c].tensors.size());
    cursor->active.clear();
    for (std::uint32_t i = 0; i < transfers.size(); ++i) {
      const Transfer& t = transfers[i];
      if (t.first > cursor->instance) {
        cursor->until = std::min(cursor->until, t.first);
      } else if (t.last > cursor->instance) {
        cursor->until = std::min(cursor->until, t.last);
        cursor->active.push_back(i);
      }
    }
  }

  void WriteOps() {
    plan_.ops.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      const Transfer& t = *entry.transfer;
      plan_.ops.push_back({entry.tensor, t.source, t.target, t.local, t.hop > 0, t.box});
    }
  }

  /// Hop by hop, so that what is passed on has arrived in an earlier round.
  void NumberRounds() {
    std::uint32_t hops = 0;
    for (const RouteKey& key : keys_) hops = std::max(hops, key.hop + 1);
    for (std::uint32_t hop = 0; hop < hops; ++hop) NumberRoundsOf(hop);
  }

  void NumberRoundsOf(std::uint32_t hop) {
    std::vector<Traffic> traffic;
    std::vector<Route*> sent;
    for (std::size_t r = 0; r < keys_.size(); ++r) {
      Route& route = plan_.routes[r];
      if (route.local || keys_[r].hop != hop) continue;
      traffic.push_back({route.source, route.target, route.bytes});
      sent.push_back(&route);
    }
    const std::vector<std::uint32_t> rounds = AssignRounds(traffic);
    const std::uint32_t first = plan_.round_count;
    for (std::size_t i = 0; i < sent.size(); ++i) {
      sent[i]->round = first + rounds[i];
      plan_.round_count = std::max(plan_.round_count, sent[i]->round + 1);
    }
  }

  const std::vector<TensorClass>& classes_;
  std::vector<std::uint32_t> class_of_;             // by tensor
  std::vector<RouteKey> keys_;                      // of the routes, ascending
  std::vector<std::vector<std::uint32_t>> routes_;  // by class and transfer
  std::vector<Entry> entries_;
  Plan plan_;
};

}  // namespace

Result<Plan> BuildPlan(const JobLayout& source, const JobLayout& target, const Topology& topology,
                       PlanFault* fault, const PlanOptions& options) {
  TB_ASSIGN_OR_RETURN(const ClassPlan classes,
                      BuildClassPlan(source, target, topology, fault, options));
  Plan plan = Materializer(classes, target.tensors.size()).Run();
  plan.class_count = static_cast<std::uint32_t>(classes.classes.size());
  plan.digest = classes.digest;
  return plan;
}

std::span<const CopyOp> RouteOps(const Plan& plan, std::uint32_t source, std::uint32_t target) {
  using Key = std::tuple<std::uint32_t, bool, std::uint32_t>;
  const auto before = [](const CopyOp& op, const Key& key) {
    return Key(op.target, op.relayed, op.source) < key;
  };
  const Key key(target, false, source);
  const auto first = std::lower_bound(plan.ops.begin(), plan.ops.end(), key, before);
  auto last = first;
  while (last != plan.ops.end() && Key(last->target, last->relayed, last->source) == key) ++last;
  return {first, last};
}

}  // namespace tensorbus::planner
