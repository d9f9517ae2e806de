#include "tensorbus/daemon/assembly.h"

#include "tensorbus/base/check.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/types/layout_combiner.h"

namespace tensorbus::daemon {

namespace {

std::uint64_t BytesOfLayout(const RankLayout& layout) {
  std::uint64_t bytes = 0;
  for (const RankLayout::Tensor& tensor : layout.tensors) {
    for (const Box& box : tensor.boxes) bytes += box.volume() * ItemBytes(tensor.spec.dtype);
  }
  return bytes;
}

}  // namespace

std::vector<RankPart> PartsOf(const std::map<std::uint32_t, RankState>& ranks) {
  std::vector<RankPart> parts;
  parts.reserve(ranks.size());
  for (const auto& [number, rank] : ranks) {
    parts.push_back({.rank = number,
                     .blob = rank.layout_blob,
                     .bytes = rank.bytes,
                     .claim = {.who = rank.identity.ToString(), .leave_out = rank.leave_out}});
  }
  return parts;
}

Result<RankSummary> CheckRank(const RankPart& part, const LayoutEntry* manifest) {
  TB_ASSIGN_OR_RETURN(const RankLayout layout,
                      ParseRankLayout(rpc::BytesOf(*part.blob), part.rank));
  if (manifest != nullptr) {
    TB_RETURN_IF_ERROR(CheckRankFits(manifest->index, layout, part.claim));
  }
  return RankSummary{.hash = HashOf(layout), .bytes = BytesOfLayout(layout)};
}

Result<std::shared_ptr<const LayoutEntry>> Assemble(const std::vector<RankPart>& ranks) {
  LayoutCombiner combiner;
  std::vector<std::uint64_t> rank_bytes;
  rank_bytes.reserve(ranks.size());
  for (const RankPart& part : ranks) {
    TB_CHECK(part.rank == rank_bytes.size());
    TB_ASSIGN_OR_RETURN(const RankLayout layout,
                        ParseRankLayout(rpc::BytesOf(*part.blob), part.rank));
    TB_RETURN_IF_ERROR(combiner.Add(layout));
    rank_bytes.push_back(part.bytes);
  }
  TB_ASSIGN_OR_RETURN(JobLayout combined, std::move(combiner).Finish());
  auto entry = std::make_shared<LayoutEntry>(std::move(combined));
  entry->hash = HashOf(entry->layout);
  entry->blob = rpc::ToString(Serialize(entry->layout));
  entry->rank_bytes = std::move(rank_bytes);
  entry->rank_boxes = BoxSumsOf(entry->layout);
  for (const JobLayout::Tensor& tensor : entry->layout.tensors) entry->bytes += tensor.spec.bytes();
  return std::shared_ptr<const LayoutEntry>(std::move(entry));
}

Status CheckReplica(const LayoutEntry& manifest, const std::vector<RankPart>& ranks,
                    const LayoutEntry* combined, std::string_view who) {
  if (combined == nullptr) {
    for (const RankPart& part : ranks) {
      TB_RETURN_IF_ERROR(CheckRank(part, &manifest).status());
    }
    return {};
  }
  std::vector<RankClaim> claims;
  claims.reserve(ranks.size());
  for (const RankPart& part : ranks) claims.push_back(part.claim);
  return CheckReplicaFits(manifest.index, combined->layout, claims, who);
}

}  // namespace tensorbus::daemon
