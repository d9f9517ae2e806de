#include "planner/plan.h"

#include <algorithm>
#include <tuple>

#include "planner/class_plan.h"

namespace tensorbus::planner {
namespace {

/// Writes a class plan out, route by route, each in tensor order, by counting instead of sorting:
/// goes through the tensors in order and appends each one's ops to their routes.
class OpWriter {
 public:
  OpWriter(const ClassPlan& plan, std::size_t tensor_count)
      : plan_(plan), class_of_(tensor_count), cursors_(plan.classes.size()) {
    for (std::uint32_t c = 0; c < plan_.classes.size(); ++c) {
      for (const std::uint32_t t : plan_.classes[c].tensors) class_of_[t] = c;
    }
  }

  std::vector<RouteOp> Run() && {
    std::vector<std::uint64_t> next;
    std::uint64_t count = 0;
    for (const Route& route : plan_.routes) {
      next.push_back(route.first_op);
      count += route.op_count;
    }
    std::vector<RouteOp> ops(count);
    for (std::uint32_t tensor = 0; tensor < class_of_.size(); ++tensor) {
      const std::uint32_t c = class_of_[tensor];
      Cursor& cursor = cursors_[c];
      if (cursor.instance == cursor.until) Renew(c, &cursor);
      ++cursor.instance;
      for (const Active& active : cursor.active) ops[next[active.route]++] = {tensor, active.box};
    }
    return ops;
  }

 private:
  struct Active {
    std::uint32_t route;
    std::uint32_t box;
  };
  /// Which transfers of a class apply to its next tensors, up to `until`.
  struct Cursor {
    std::uint32_t instance = 0;
    std::uint32_t until = 0;
    std::vector<Active> active;
  };

  void Renew(std::uint32_t c, Cursor* cursor) const {
    cursor->until = static_cast<std::uint32_t>(plan_.classes[c].tensors.size());
    cursor->active.clear();
    for (const Transfer& t : plan_.transfers[c]) {
      if (t.first > cursor->instance) {
        cursor->until = std::min(cursor->until, t.first);
      } else if (t.last > cursor->instance) {
        cursor->until = std::min(cursor->until, t.last);
        cursor->active.push_back({t.route, t.box});
      }
    }
  }

  const ClassPlan& plan_;
  std::vector<std::uint32_t> class_of_;  // by tensor
  std::vector<Cursor> cursors_;          // by class
};

}  // namespace

Result<Plan> BuildPlan(const JobLayout& source, const JobLayout& target, const Topology& topology,
                       PlanFault* fault, const PlanOptions& options) {
  TB_ASSIGN_OR_RETURN(ClassPlan classes, BuildClassPlan(source, target, topology, fault, options));
  Plan plan;
  plan.ops = OpWriter(classes, target.tensors.size()).Run();
  plan.boxes = std::move(classes.boxes);
  plan.routes = std::move(classes.routes);
  plan.round_count = classes.round_count;
  plan.class_count = static_cast<std::uint32_t>(classes.classes.size());
  plan.options = options;
  plan.digest = classes.digest;
  return plan;
}

OpRange RouteOps(const Plan& plan, std::uint32_t source, std::uint32_t target) {
  using Key = std::tuple<std::uint32_t, bool, std::uint32_t>;
  const auto key_of = [](const Route& route) {
    return Key(route.target, route.relayed, route.source);
  };
  const Key key(target, false, source);
  const auto found =
      std::lower_bound(plan.routes.begin(), plan.routes.end(), key,
                       [&](const Route& route, const Key& k) { return key_of(route) < k; });
  const bool there = found != plan.routes.end() && key_of(*found) == key;
  return there ? OpsOf(plan, *found) : OpRange();
}

}  // namespace tensorbus::planner
