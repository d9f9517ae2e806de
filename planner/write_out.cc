#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "planner/class_plan.h"
#include "planner/numbering.h"

namespace tensorbus::planner {
namespace {

constexpr std::uint32_t kNotWritten = std::numeric_limits<std::uint32_t>::max();

/// Ops per run of tensors from which on patterns of routes are looked for. Below it, as in most
/// plans with relays, finding them costs more than they spare.
constexpr std::uint64_t kLongRun = 32;

/// Neighbours in a class of which a box takes some route.
struct TensorRun {
  std::uint32_t tensor_class = 0;
  std::uint32_t first = 0;  ///< places in TensorClass::tensors: [first, last)
  std::uint32_t last = 0;

  friend bool operator==(const TensorRun&, const TensorRun&) = default;
};

/// All that a route carries but for the boxes: by class, then box.
using Pattern = std::vector<TensorRun>;

struct HashOfPattern {
  std::size_t operator()(const Pattern& pattern) const noexcept {
    return static_cast<std::size_t>(Checksum64(std::as_bytes(std::span(pattern))));
  }
};

/// Fills lists of ops, each in tensor order, by counting instead of sorting: goes through the
/// tensors in order and appends what applies to each to its lists.
class TensorWalk {
 public:
  /// Something that is written for each of a run of tensors.
  struct Entry {
    std::uint32_t list = 0;
    std::uint32_t value = 0;  ///< what the list says of a tensor
  };
  /// The entries that apply to the next tensors of a class, up to `until`.
  struct Cursor {
    std::uint32_t instance = 0;
    std::uint32_t until = 0;
    std::vector<Entry> active;

    /// Whether a run has the next tensor; `until` is no further than where that changes.
    bool IsIn(std::uint32_t first, std::uint32_t last) {
      if (last <= instance) return false;
      until = std::min(until, first > instance ? first : last);
      return first <= instance;
    }
  };

  explicit TensorWalk(const std::vector<TensorClass>& classes) : classes_(classes) {}

  /// `renew(c, &cursor)` adds what is active in class c to a cursor. `next` has each list's
  /// beginning in `out`.
  template <typename Renew, typename Op>
  void Run(const Renew& renew, std::vector<std::uint64_t> next, std::vector<Op>* out) const {
    std::vector<Cursor> cursors(classes_.size());
    const std::vector<std::uint32_t> class_of = ClassOfTensors();
    for (std::uint32_t tensor = 0; tensor < class_of.size(); ++tensor) {
      const std::uint32_t c = class_of[tensor];
      Cursor& cursor = cursors[c];
      if (cursor.instance == cursor.until) {
        cursor.until = static_cast<std::uint32_t>(classes_[c].tensors.size());
        cursor.active.clear();
        renew(c, &cursor);
      }
      ++cursor.instance;
      for (const Entry& entry : cursor.active) (*out)[next[entry.list]++] = {tensor, entry.value};
    }
  }

 private:
  std::vector<std::uint32_t> ClassOfTensors() const {
    std::size_t count = 0;
    for (const TensorClass& c : classes_) count += c.tensors.size();
    std::vector<std::uint32_t> class_of(count);
    for (std::uint32_t c = 0; c < classes_.size(); ++c) {
      for (const std::uint32_t t : classes_[c].tensors) class_of[t] = c;
    }
    return class_of;
  }

  const std::vector<TensorClass>& classes_;
};

/// Writes a class plan out, or the part of it that some routes make, route by route, each in tensor
/// order.
class OpWriter {
 public:
  explicit OpWriter(const ClassPlan& classes)
      : classes_(classes), written_(classes.routes.size(), kNotWritten) {
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
    op_count_ += route.op_count;
  }

  Plan Run() && {
    if (op_count_ >= kLongRun * CountRuns()) {
      WriteByPattern();
    } else {
      WriteByTensor();
    }
    return std::move(plan_);
  }

 private:
  /// One op of every route of a pattern.
  struct Place {
    std::uint32_t tensor = 0;
    std::uint32_t run = 0;  ///< which of the pattern's
  };
  struct PatternRun {
    std::uint32_t first = 0;  ///< as in TensorRun
    std::uint32_t last = 0;
    TensorWalk::Entry entry;  ///< pattern, and which of its runs it is
  };

  /// All routes at once, which writes here and there in memory.
  void WriteByTensor() {
    plan_.ops.resize(op_count_);
    std::vector<std::uint64_t> next;
    for (const Route& route : plan_.routes) next.push_back(route.first_op);
    const auto renew = [&](std::uint32_t c, TensorWalk::Cursor* cursor) {
      for (const Passage& p : classes_.passages[c]) {
        if (!cursor->IsIn(p.first, p.last)) continue;
        for (const std::uint32_t route : classes_.paths[p.path]) {
          if (written_[route] != kNotWritten) cursor->active.push_back({written_[route], p.box});
        }
      }
    };
    TensorWalk(classes_.classes).Run(renew, std::move(next), &plan_.ops);
  }

  /// Where runs are long, most routes carry boxes of the very same tensors as others do. The order
  /// of such a pattern is found once, and a route is written from end to end by putting its own
  /// boxes in.
  void WriteByPattern() {
    ListRuns();
    FindPatterns();
    OrderPatterns();
    plan_.ops.reserve(op_count_);
    for (std::size_t r = 0; r < plan_.routes.size(); ++r) {
      const std::uint32_t* boxes = &boxes_[starts_[r]];
      const std::uint32_t p = pattern_of_[r];
      const auto places = std::span(places_).subspan(first_places_[p], plan_.routes[r].op_count);
      for (const Place& place : places) plan_.ops.push_back({place.tensor, boxes[place.run]});
    }
  }

  template <typename Visit>
  void ForEachRun(const Visit& visit) const {
    for (std::uint32_t c = 0; c < classes_.classes.size(); ++c) {
      for (const Passage& p : classes_.passages[c]) {
        for (const std::uint32_t route : classes_.paths[p.path]) {
          if (written_[route] != kNotWritten)
            visit(written_[route], TensorRun{c, p.first, p.last}, p.box);
        }
      }
    }
  }

  std::uint64_t CountRuns() const {
    std::uint64_t count = 0;
    ForEachRun([&](std::uint32_t, const TensorRun&, std::uint32_t) { ++count; });
    return count;
  }

  /// Fills `starts_`, `runs_` and `boxes_`.
  void ListRuns() {
    starts_.assign(plan_.routes.size() + 1, 0);
    ForEachRun([&](std::uint32_t route, const TensorRun&, std::uint32_t) { ++starts_[route + 1]; });
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    runs_.resize(starts_.back());
    boxes_.resize(starts_.back());
    std::vector<std::size_t> next = starts_;
    ForEachRun([&](std::uint32_t route, const TensorRun& run, std::uint32_t box) {
      runs_[next[route]] = run;
      boxes_[next[route]++] = box;
    });
  }

  /// Fills `pattern_of_`, `pattern_runs_` and `first_places_`.
  void FindPatterns() {
    Numbering<Pattern, HashOfPattern> patterns;
    for (std::size_t r = 0; r < plan_.routes.size(); ++r) {
      const auto runs = std::span(runs_).subspan(starts_[r], starts_[r + 1] - starts_[r]);
      pattern_of_.push_back(patterns.Add(Pattern(runs.begin(), runs.end())));
    }
    pattern_runs_.resize(classes_.classes.size());
    first_places_.assign(1, 0);
    for (std::uint32_t p = 0; p < patterns.size(); ++p) {
      std::uint64_t end = first_places_.back();
      for (std::uint32_t i = 0; i < patterns[p].size(); ++i) {
        const TensorRun& run = patterns[p][i];
        pattern_runs_[run.tensor_class].push_back({run.first, run.last, {p, i}});
        end += run.last - run.first;
      }
      first_places_.push_back(end);
    }
  }

  void OrderPatterns() {
    places_.resize(first_places_.back());
    const auto renew = [&](std::uint32_t c, TensorWalk::Cursor* cursor) {
      for (const PatternRun& run : pattern_runs_[c]) {
        if (cursor->IsIn(run.first, run.last)) cursor->active.push_back(run.entry);
      }
    };
    TensorWalk(classes_.classes).Run(renew, first_places_, &places_);
  }

  const ClassPlan& classes_;
  std::vector<std::uint32_t>
      written_;  // by the class plan's route: its number here, or kNotWritten
  std::uint64_t op_count_ = 0;
  Plan plan_;

  // The runs of all routes, route by route, each by class, then box:
  std::vector<std::size_t> starts_;  // by route: its runs are [starts_[r], starts_[r + 1])
  std::vector<TensorRun> runs_;
  std::vector<std::uint32_t> boxes_;                   // by run
  std::vector<std::uint32_t> pattern_of_;              // by route
  std::vector<std::vector<PatternRun>> pattern_runs_;  // by class; by pattern, then box
  std::vector<std::uint64_t> first_places_;            // by pattern, in `places_`; and the end
  std::vector<Place> places_;                          // pattern by pattern; by tensor, then box
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
