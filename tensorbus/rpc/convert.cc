#include "tensorbus/rpc/convert.h"

#include <array>
#include <fmt/format.h>

#include "tensorbus/base/malformed.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::rpc {

Status CheckName(std::string_view what, std::string_view name) {
  if (name.empty()) return Malformed(fmt::format("{} is empty", what));
  if (name.size() > kMaxIdentityBytes) {
    return Malformed(fmt::format("{} has {} bytes, at most {} are allowed", what, name.size(),
                                 kMaxIdentityBytes));
  }
  if (IsPrintable(name)) return {};
  return Malformed(
      fmt::format("{} has control characters or is not UTF-8: '{}'", what, Printable(name)));
}

proto::Rank ToProto(const RankIdentity& rank) {
  proto::Rank out;
  out.set_channel(rank.channel);
  out.set_job(rank.job);
  out.set_role(static_cast<std::uint32_t>(rank.role));
  out.set_replica(rank.replica);
  out.set_rank(rank.rank);
  out.set_rank_count(rank.rank_count);
  return out;
}

Result<RankIdentity> FromProto(const proto::Rank& rank) {
  TB_RETURN_IF_ERROR(CheckName("the channel's name", rank.channel()));
  TB_RETURN_IF_ERROR(CheckName("the job's name", rank.job()));
  if (rank.role() != static_cast<std::uint32_t>(Role::kProducer) &&
      rank.role() != static_cast<std::uint32_t>(Role::kConsumer)) {
    return Malformed(fmt::format("role {} is neither producer nor consumer", rank.role()));
  }
  const auto role = static_cast<Role>(rank.role());
  if (rank.rank_count() == 0 || rank.rank_count() > kMaxRanks) {
    return Malformed(fmt::format("rank count {} is not in [1, {}]", rank.rank_count(), kMaxRanks));
  }
  if (rank.rank() >= rank.rank_count()) {
    return Malformed(
        fmt::format("rank {} is not below the rank count {}", rank.rank(), rank.rank_count()));
  }
  if (rank.replica() >= kMaxReplicas || (role == Role::kProducer && rank.replica() != 0)) {
    return Malformed(fmt::format("replica {} is not valid for this role", rank.replica()));
  }
  return RankIdentity{.channel = rank.channel(),
                      .job = rank.job(),
                      .role = role,
                      .replica = rank.replica(),
                      .rank = rank.rank(),
                      .rank_count = rank.rank_count()};
}

proto::Hash ToProto(const Hash128& hash) {
  proto::Hash out;
  out.set_low(hash.low);
  out.set_high(hash.high);
  return out;
}

Hash128 FromProto(const proto::Hash& hash) {
  return {.low = hash.low(), .high = hash.high()};
}

proto::Digest ToProto(const DigestSum& sum) {
  proto::Digest out;
  out.set_a(sum.a);
  out.set_b(sum.b);
  out.set_bytes(sum.bytes);
  return out;
}

DigestSum FromProto(const proto::Digest& digest) {
  return {.a = digest.a(), .b = digest.b(), .bytes = digest.bytes()};
}

proto::BoxSum ToProto(const BoxSum& sum) {
  proto::BoxSum out;
  out.set_sum(sum.sum);
  out.set_located(sum.located);
  return out;
}

BoxSum FromProto(const proto::BoxSum& sum) {
  return {.sum = sum.sum(), .located = sum.located()};
}

proto::BoxMessage ToProto(const Box& box) {
  proto::BoxMessage out;
  for (const Range& range : box.ranges()) {
    out.add_lo(range.lo);
    out.add_hi(range.hi);
  }
  return out;
}

Result<Box> FromProto(const proto::BoxMessage& box) {
  if (box.lo_size() != box.hi_size() || box.lo_size() > kMaxDims) {
    return Malformed(
        fmt::format("a box with {} lower and {} upper bounds", box.lo_size(), box.hi_size()));
  }
  std::array<Range, kMaxDims> ranges = {};
  for (int d = 0; d < box.lo_size(); ++d) {
    const Range range{.lo = box.lo(d), .hi = box.hi(d)};
    if (range.empty()) {
      return Malformed(fmt::format("an empty range [{}, {}) in a box", range.lo, range.hi));
    }
    ranges[static_cast<std::size_t>(d)] = range;
  }
  return Box(std::span<const Range>(ranges).first(static_cast<std::size_t>(box.lo_size())));
}

}  // namespace tensorbus::rpc
