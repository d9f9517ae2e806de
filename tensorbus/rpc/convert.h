#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/box.h"
#include "tensorbus/types/box_sum.h"
#include "tensorbus/types/ids.h"
#include "tensorbus/types/strided.h"

// Messages to plain values and back. What comes from a peer is checked here, once.
namespace tensorbus::rpc {

/// Most bytes of the name of a channel, job, agent or host.
inline constexpr std::size_t kMaxIdentityBytes = 256;
/// Most replicas of one job.
inline constexpr std::uint32_t kMaxReplicas = 65536;
/// Greatest epoch of a channel: whoever goes on from it can still count.
inline constexpr std::uint64_t kMaxChannelEpoch = std::uint64_t{1} << 62;

/// Whether a channel, job, agent or host may be called so: 1 to kMaxIdentityBytes bytes, printable.
/// `what` is for the message: "the channel's name".
///
/// Errors: kInvalidArgument/kMalformed.
Status CheckName(std::string_view what, std::string_view name);

proto::Rank ToProto(const RankIdentity& rank);
/// Errors: kInvalidArgument/kMalformed naming the field: as CheckName(), unknown role,
/// rank not below rank_count, a producer with a replica.
Result<RankIdentity> FromProto(const proto::Rank& rank);

proto::Hash ToProto(const Hash128& hash);
Hash128 FromProto(const proto::Hash& hash);

proto::Digest ToProto(const DigestSum& sum);
DigestSum FromProto(const proto::Digest& digest);

proto::BoxSum ToProto(const BoxSum& sum);
BoxSum FromProto(const proto::BoxSum& sum);

proto::BoxMessage ToProto(const Box& box);
/// Errors: kInvalidArgument/kMalformed: more than kMaxDims dimensions, lo and hi of different
/// length, or an empty range.
Result<Box> FromProto(const proto::BoxMessage& box);

/// The bytes of a `bytes` field, borrowed.
inline std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string ToString(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace tensorbus::rpc
