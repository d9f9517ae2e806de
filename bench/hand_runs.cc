#include "bench/hand_runs.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "planner/plan.h"
#include "planner/topology.h"
#include "tensorbus/cli/bench_pattern.h"

namespace tensorbus::bench {
namespace {

using cli::ArenaPiece;
using cli::RankArena;

/// The pieces of a rank by tensor name.
class PieceIndex {
 public:
  PieceIndex(const JobLayout& layout, std::uint32_t rank) : arena_(cli::PlaceRank(layout, rank)) {
    for (const ArenaPiece& piece : arena_.pieces) {
      by_name_[layout.tensors[piece.tensor].spec.name].push_back(&piece);
    }
  }

  /// The piece that `box` lies in; null when there is none.
  const ArenaPiece* Find(std::string_view name, const Box& box) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return nullptr;
    for (const ArenaPiece* piece : found->second) {
      if (piece->box.Contains(box)) return piece;
    }
    return nullptr;
  }

 private:
  RankArena arena_;
  std::map<std::string, std::vector<const ArenaPiece*>, std::less<>> by_name_;
};

/// Byte offset in the arena of an element of the tensor, given by its index per dimension.
std::uint64_t OffsetOf(const ArenaPiece& piece, const std::array<std::uint64_t, kMaxDims>& index,
                       std::uint32_t item_bytes) {
  std::uint64_t offset = 0;
  for (int d = 0; d < piece.box.rank(); ++d) {
    offset = offset * piece.box[d].size() + index[static_cast<std::size_t>(d)] - piece.box[d].lo;
  }
  return piece.offset + offset * item_bytes;
}

void AddRuns(const Box& box, const ArenaPiece& from, const ArenaPiece& to, std::uint32_t source,
             std::uint32_t item_bytes, std::vector<Run>& runs) {
  // Trailing dimensions that the box shares whole with both pieces, and one more, are contiguous.
  std::uint64_t elements = 1;
  int outer = box.rank();
  while (outer > 0) {
    --outer;
    elements *= box[outer].size();
    if (box[outer] != from.box[outer] || box[outer] != to.box[outer]) break;
  }
  std::array<std::uint64_t, kMaxDims> index = {};
  for (int d = 0; d < box.rank(); ++d) index[static_cast<std::size_t>(d)] = box[d].lo;
  const std::uint64_t count = elements == 0 ? 0 : box.volume() / elements;
  for (std::uint64_t r = 0; r < count; ++r) {
    runs.push_back({source, OffsetOf(from, index, item_bytes), OffsetOf(to, index, item_bytes),
                    elements * item_bytes});
    for (int d = outer - 1; d >= 0; --d) {
      std::uint64_t& digit = index[static_cast<std::size_t>(d)];
      if (++digit < box[d].hi) break;
      digit = box[d].lo;
    }
  }
}

/// Joins neighbours that continue each other on both sides.
void Merge(std::vector<Run>& runs) {
  std::size_t last = 0;
  for (std::size_t i = 1; i < runs.size(); ++i) {
    Run& before = runs[last];
    const Run& run = runs[i];
    if (run.source == before.source && run.source_offset == before.source_offset + before.bytes &&
        run.target_offset == before.target_offset + before.bytes) {
      before.bytes += run.bytes;
    } else {
      runs[++last] = run;
    }
  }
  if (!runs.empty()) runs.resize(last + 1);
}

}  // namespace

Result<std::vector<Run>> RunsOf(const JobLayout& source, const JobLayout& target,
                                std::uint32_t rank) {
  TB_ASSIGN_OR_RETURN(
      const planner::Plan plan,
      planner::BuildPlan(source, target,
                         planner::DefaultTopology(source.rank_count, target.rank_count, false)));
  const PieceIndex to(target, rank);
  std::map<std::uint32_t, PieceIndex> from;
  std::vector<Run> runs;
  for (const planner::Route& route : plan.routes) {
    if (route.target != rank) continue;
    const PieceIndex& sender = from.try_emplace(route.source, source, route.source).first->second;
    for (const CopyOp& op : planner::OpsOf(plan, route)) {
      const TensorSpec& spec = target.tensors[op.tensor].spec;
      const ArenaPiece* source_piece = sender.Find(spec.name, op.box);
      const ArenaPiece* target_piece = to.Find(spec.name, op.box);
      if (source_piece == nullptr || target_piece == nullptr) {
        return Status(Code::kInternal, "an op of '" + spec.name + "' lies in no single piece");
      }
      AddRuns(op.box, *source_piece, *target_piece, op.source, ItemBytes(spec.dtype), runs);
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return a.target_offset < b.target_offset; });
  Merge(runs);
  return runs;
}

}  // namespace tensorbus::bench
