#include <array>
#include <map>
#include <random>
#include <tuple>

#include "planner/certificate.h"
#include "planner/topology.h"
#include "tests/testing/sanitized.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

// Changes one op of a good plan at a time and asks the certificate. Tables always agree with the
// ops and ops are in order, so that nothing but the fault itself can be what is seen.

namespace tensorbus::planner {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::IsStatus;

class Mutator {
 public:
  Mutator(const JobPair& pair, const Topology& topology, std::uint64_t seed)
      : pair_(pair), topology_(topology), random_(seed) {
    original_ = AllOps(BuildPlan(pair.source, pair.target, topology).value());
  }

  /// A plan with one fault in one op; `changed()` is that op as it was, `other_target()` the rank
  /// that it was turned to.
  Plan Next() {
    while (true) {
      std::vector<CopyOp> ops = original_;
      const std::size_t at = Below(ops.size());
      changed_ = ops[at];
      other_target_ = changed_.target;
      kind_ = kKinds[Below(kKinds.size())];
      if (!Change(&ops, at)) continue;
      for (CopyOp& op : ops) op.local = OneDevice(op.source, op.target);
      std::sort(ops.begin(), ops.end(), [](const CopyOp& a, const CopyOp& b) {
        return std::tie(a.target, a.source, a.tensor, a.box) <
               std::tie(b.target, b.source, b.tensor, b.box);
      });
      return PlanOf(ops, pair_.target);
    }
  }

  std::string_view kind() const { return kind_; }
  const CopyOp& changed() const { return changed_; }
  std::uint32_t other_target() const { return other_target_; }

 private:
  static constexpr std::array<std::string_view, 8> kKinds = {
      "drop", "repeat", "shift", "shrink", "overlap", "wrong holder", "wrong rank", "wrong tensor"};

  std::uint64_t Below(std::uint64_t bound) { return random_() % bound; }

  bool OneDevice(std::uint32_t source, std::uint32_t target) const {
    const auto& pairs = topology_.same_device;
    return std::count(pairs.begin(), pairs.end(), std::pair(source, target)) != 0;
  }

  bool Holds(const JobLayout& job, std::uint32_t tensor, std::uint32_t rank, const Box& box) const {
    for (const RankBoxes& held : job.HoldingOf(job.tensors[tensor]).ranks) {
      if (held.rank != rank) continue;
      for (const Box& whole : held.boxes) {
        if (whole.Contains(box)) return true;
      }
    }
    return false;
  }

  /// Whether there is such a change of this op.
  bool Change(std::vector<CopyOp>* ops, std::size_t at) {
    CopyOp& op = (*ops)[at];
    if (kind_ == "drop") {
      ops->erase(ops->begin() + static_cast<std::ptrdiff_t>(at));
      return true;
    }
    if (kind_ == "repeat") {
      // From the same source the order would tell; so from another holder, if there is one.
      CopyOp again = op;
      for (std::uint32_t s = 0; s < pair_.source.rank_count; ++s) {
        if (s != op.source && Holds(pair_.source, op.tensor, s, op.box)) again.source = s;
      }
      ops->push_back(again);
      return true;
    }
    if (kind_ == "wrong holder") {
      op.source = static_cast<std::uint32_t>(Below(pair_.source.rank_count));
      return !Holds(pair_.source, op.tensor, op.source, op.box);
    }
    if (kind_ == "wrong rank") {
      op.target = static_cast<std::uint32_t>(Below(pair_.target.rank_count));
      other_target_ = op.target;
      return op.target != changed_.target;
    }
    if (kind_ == "wrong tensor") {
      op.tensor = static_cast<std::uint32_t>(Below(pair_.target.tensors.size()));
      const auto rank = [&](std::uint32_t t) { return pair_.target.tensors[t].spec.shape.rank(); };
      return op.tensor != changed_.tensor && rank(op.tensor) == rank(changed_.tensor);
    }
    Range& range = op.box[static_cast<int>(Below(static_cast<std::uint64_t>(op.box.rank())))];
    const std::uint64_t by = 1 + Below(3);
    if (kind_ == "shift") {
      const bool up = Below(2) == 0;
      if (!up && range.lo < by) return false;
      range.lo = up ? range.lo + by : range.lo - by;
      range.hi = up ? range.hi + by : range.hi - by;
      return true;
    }
    if (kind_ == "shrink") {
      if (range.size() <= by) return false;
      if (Below(2) == 0) {
        range.lo += by;
      } else {
        range.hi -= by;
      }
      return true;
    }
    // An overlap: the window grows into what its neighbours bring, or out of its boxes.
    if (Below(2) == 0) {
      range.hi += by;
    } else {
      if (range.lo < by) return false;
      range.lo -= by;
    }
    return true;
  }

  const JobPair& pair_;
  const Topology& topology_;
  std::mt19937_64 random_;
  std::vector<CopyOp> original_;
  std::string_view kind_;
  CopyOp changed_;
  std::uint32_t other_target_ = 0;
};

TEST(Mutations, OfOneOpAreAllRefusedAndNamed) {
  constexpr int kMutations = testing::kSanitized ? 1'200 : 12'000;
  const JobPair pair = SmallModel(3);
  const Topology topology = DefaultTopology(6, 4, true);
  Mutator mutator(pair, topology, 20'260'731);
  std::map<std::string_view, int> tried;
  for (int i = 0; i < kMutations; ++i) {
    const Plan plan = mutator.Next();
    ++tried[mutator.kind()];
    SCOPED_TRACE(::testing::Message() << "mutation " << i << ": " << mutator.kind());
    const Result<Certificate> whole = CheckPlan(pair.source, pair.target, topology, plan);
    ASSERT_THAT(whole, IsStatus(Code::kInternal, Reason::kPlanMismatch));
    const CopyOp& changed = mutator.changed();
    const std::string target = "target " + std::to_string(changed.target);
    const std::string other = "target " + std::to_string(mutator.other_target());
    ASSERT_THAT(whole.status().message(), HasSubstr("tensor '"));
    ASSERT_THAT(whole.status().message(), AnyOf(HasSubstr(target), HasSubstr(other)));
    if (mutator.kind() != "wrong tensor") {  // there another tensor may come first
      ASSERT_THAT(whole.status().message(),
                  HasSubstr("tensor '" + pair.target.tensors[changed.tensor].spec.name + "'"));
    }
    // The rank that lacks the op, or has too much, sees it by itself.
    std::vector<CopyOp> own;
    for (const CopyOp& op : AllOps(plan)) {
      if (op.target == changed.target) own.push_back(op);
    }
    ASSERT_THAT(CheckPart(pair.source, pair.target, topology, PlanOf(own, pair.target),
                          {{}, {changed.target}}),
                IsStatus(Code::kInternal, Reason::kPlanMismatch));
  }
  EXPECT_EQ(tried.size(), 8U);
  for (const auto& [kind, count] : tried) EXPECT_GT(count, kMutations / 15) << kind;
}

}  // namespace
}  // namespace tensorbus::planner
