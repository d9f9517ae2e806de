#include <algorithm>
#include <limits>

#include "planner/class_plan.h"

namespace tensorbus::planner {
namespace {

constexpr std::uint32_t kNotWritten = std::numeric_limits<std::uint32_t>::max();

/// Writes a class plan out, or the part of it that some routes make, route by route, each in tensor
/// order, by counting instead of sorting: goes through the tensors in order and appends each one's
/// ops to their routes.
class OpWriter {
 public:
  explicit OpWriter(const ClassPlan& classes)
      : classes_(classes),
        written_(classes.routes.size(), kNotWritten),
        cursors_(classes.classes.size()) {
    plan_.boxes = classes.boxes;
    plan_.round_count = classes.round_count;
    plan_.class_count = static_cast<std::uint32_t>(classes.classes.size());
    plan_.options = classes.options;
    plan_.digest = classes.digest;
  }

  /// Routes are added in their order.
  void AddRoute(std::size_t number) {
    written_[number] = static_cast<std::uint32_t>(plan_.routes.size());
    Route& route = plan_.routes.emplace_back(classes_.routes[number]);
    route.first_op = op_count_;
    next_.push_back(op_count_);
    op_count_ += route.op_count;
  }

  Plan Run() && {
    plan_.ops.resize(op_count_);
    const std::vector<std::uint32_t> class_of = ClassOfTensors();
    for (std::uint32_t tensor = 0; tensor < class_of.size(); ++tensor) {
      const std::uint32_t c = class_of[tensor];
      Cursor& cursor = cursors_[c];
      if (cursor.instance == cursor.until) Renew(c, &cursor);
      ++cursor.instance;
      for (const Active& active : cursor.active)
        plan_.ops[next_[active.route]++] = {tensor, active.box};
    }
    return std::move(plan_);
  }

 private:
  struct Active {
    std::uint32_t route;
    std::uint32_t box;
  };
  /// Which passages of a class apply to its next tensors, up to `until`.
  struct Cursor {
    std::uint32_t instance = 0;
    std::uint32_t until = 0;
    std::vector<Active> active;
  };

  std::vector<std::uint32_t> ClassOfTensors() const {
    std::size_t count = 0;
    for (const TensorClass& c : classes_.classes) count += c.tensors.size();
    std::vector<std::uint32_t> class_of(count);
    for (std::uint32_t c = 0; c < classes_.classes.size(); ++c) {
      for (const std::uint32_t t : classes_.classes[c].tensors) class_of[t] = c;
    }
    return class_of;
  }

  void Renew(std::uint32_t c, Cursor* cursor) const {
    cursor->until = static_cast<std::uint32_t>(classes_.classes[c].tensors.size());
    cursor->active.clear();
    for (const Passage& p : classes_.passages[c]) {
      if (p.first > cursor->instance) {
        cursor->until = std::min(cursor->until, p.first);
      } else if (p.last > cursor->instance) {
        cursor->until = std::min(cursor->until, p.last);
        for (const std::uint32_t route : classes_.paths[p.path]) {
          if (written_[route] != kNotWritten) cursor->active.push_back({written_[route], p.box});
        }
      }
    }
  }

  const ClassPlan& classes_;
  std::vector<std::uint32_t>
      written_;                      // by the class plan's route: its number here, or kNotWritten
  std::vector<std::uint64_t> next_;  // by route: where its next op goes
  std::vector<Cursor> cursors_;      // by class
  std::uint64_t op_count_ = 0;
  Plan plan_;
};

}  // namespace

Plan WriteOut(const ClassPlan& plan) {
  OpWriter writer(plan);
  for (std::size_t r = 0; r < plan.routes.size(); ++r) writer.AddRoute(r);
  return std::move(writer).Run();
}

Plan PlanForRanks(const ClassPlan& plan, const RankSelection& ranks) {
  const auto among = [](const std::vector<std::uint32_t>& list, std::uint32_t rank) {
    return std::binary_search(list.begin(), list.end(), rank);
  };
  OpWriter writer(plan);
  for (std::size_t r = 0; r < plan.routes.size(); ++r) {
    const Route& route = plan.routes[r];
    const std::vector<std::uint32_t>& senders = route.relayed ? ranks.targets : ranks.sources;
    if (among(ranks.targets, route.target) || among(senders, route.source)) writer.AddRoute(r);
  }
  return std::move(writer).Run();
}

}  // namespace tensorbus::planner
