#include "agent/receipts.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace tensorbus::agent {
namespace {

/// What tells two blocks of one rank's memory apart.
using BlockIdentity =
    std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::array<std::uint64_t, kMaxDims>>;

BlockIdentity IdentityOf(const PlacedBlock& placed) {
  return {placed.piece, placed.offset, placed.block.stream_offset, placed.block.extents};
}

}  // namespace

void MakeRouteSums(const PieceWork& work, std::shared_ptr<const BoundRoutes> routes,
                   std::shared_ptr<const MemoryAccess> memory,
                   std::function<void(Result<RouteSums>)> done) {
  auto blocks = std::make_shared<std::vector<PlacedBlock>>();
  auto index = std::make_shared<std::vector<std::vector<std::uint32_t>>>();
  std::map<BlockIdentity, std::uint32_t> known;
  for (const BoundRoute& route : *routes) {
    std::vector<std::uint32_t>& of_route = index->emplace_back();
    of_route.reserve(route.blocks.size());
    for (const PlacedBlock& placed : route.blocks) {
      const auto [at, is_new] =
          known.emplace(IdentityOf(placed), static_cast<std::uint32_t>(blocks->size()));
      if (is_new) blocks->push_back(placed);
      of_route.push_back(at->second);
    }
  }
  DigestBlocks(work, blocks, std::move(memory),
               [index, done = std::move(done)](const Result<std::vector<DigestSum>>& sums) {
                 if (!sums.ok()) return done(sums.status());
                 RouteSums out;
                 for (const std::vector<std::uint32_t>& of_route : *index) {
                   std::vector<DigestSum>& route = out.emplace_back();
                   route.reserve(of_route.size());
                   for (const std::uint32_t i : of_route) route.push_back((*sums)[i]);
                 }
                 done(std::move(out));
               });
}

std::int64_t FirstDifference(const std::vector<DigestSum>& a, const std::vector<DigestSum>& b) {
  const auto [left, right] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  if (left == a.end() && right == b.end()) return -1;
  return left - a.begin();
}

}  // namespace tensorbus::agent
