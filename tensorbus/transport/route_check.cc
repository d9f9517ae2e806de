#include "tensorbus/transport/route_check.h"

#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/byte_io.h"
#include "tensorbus/base/hash.h"

namespace tensorbus::transport {

namespace {

bool SameShape(const StridedBlock& a, const StridedBlock& b) {
  return a.rank == b.rank && a.item_bytes == b.item_bytes &&
         std::equal(a.extents.begin(), a.extents.begin() + a.rank, b.extents.begin());
}

Status Mismatch(const RouteKey& key, const std::string& detail) {
  return {Code::kInvalidArgument,
          fmt::format("{}: the two ends differ: {}", RouteName(key), detail),
          Reason::kPlanMismatch};
}

}  // namespace

std::string RouteName(const RouteKey& key) {
  return fmt::format("session {} route {} -> {}", key.session.value, key.source_rank,
                     key.target_rank);
}

std::uint64_t ShapeOf(const RouteEnd& end) {
  ByteWriter writer;
  writer.Put(static_cast<std::uint64_t>(end.blocks.size()));
  for (const StridedBlock& block : end.blocks) {
    writer.Put(block.rank);
    writer.Put(block.item_bytes);
    for (std::size_t d = 0; d < block.rank; ++d) writer.Put(block.extents[d]);
  }
  return Checksum64(writer.bytes());
}

Status CheckEnd(const RouteEnd& end) {
  const auto bad = [](std::string message) {
    return Status(Code::kInvalidArgument, std::move(message), Reason::kMalformed);
  };
  for (std::size_t i = 0; i < end.blocks.size(); ++i) {
    if (end.blocks[i].rank > kMaxDims) return bad(fmt::format("block {}: too many dimensions", i));
  }
  for (const RouteEnd::Alias& alias : end.aliases) {
    if (alias.block >= end.blocks.size()) {
      return bad(fmt::format("alias of block {}, which the route does not have", alias.block));
    }
    if (!SameShape(end.blocks[alias.block], alias.place)) {
      return bad(fmt::format("alias of block {} has another shape", alias.block));
    }
    if (!SameShape(alias.place, alias.check())) {
      return bad(fmt::format("alias of block {} is read back in another shape", alias.block));
    }
  }
  if (end.readback.empty()) return {};
  if (end.readback.size() != end.blocks.size()) {
    return bad(fmt::format("{} places to read back for {} blocks", end.readback.size(),
                           end.blocks.size()));
  }
  for (std::size_t i = 0; i < end.blocks.size(); ++i) {
    if (!SameShape(end.blocks[i], end.readback[i])) {
      return bad(fmt::format("block {} is read back in another shape", i));
    }
  }
  return {};
}

Status CheckEndsMatch(const RouteKey& key, const RouteEnd& source, const RouteEnd& target) {
  if (source.blocks.size() != target.blocks.size()) {
    return Mismatch(key, fmt::format("{} blocks at the source, {} at the target",
                                     source.blocks.size(), target.blocks.size()));
  }
  for (std::size_t i = 0; i < source.blocks.size(); ++i) {
    const StridedBlock& from = source.blocks[i];
    const StridedBlock& to = target.blocks[i];
    if (!SameShape(from, to)) {
      return Mismatch(key, fmt::format("block {} has {} bytes at the source, {} at the target, or "
                                       "other extents",
                                       i, from.bytes(), to.bytes()));
    }
  }
  return {};
}

Status BlockMismatch(const RouteKey& key, std::uint32_t block, const std::string& detail) {
  return {Code::kDataLoss, fmt::format("{} block {}: {}", RouteName(key), block, detail),
          Reason::kChecksumMismatch, std::int64_t{block} + 1};
}

Status RouteMismatch(const RouteKey& key, const std::string& detail) {
  return {Code::kDataLoss, fmt::format("{}: {}", RouteName(key), detail),
          Reason::kChecksumMismatch};
}

std::optional<std::uint32_t> MismatchedBlock(const Status& status) {
  if (status.reason() != Reason::kChecksumMismatch || status.native() <= 0) return std::nullopt;
  return static_cast<std::uint32_t>(status.native() - 1);
}

}  // namespace tensorbus::transport
