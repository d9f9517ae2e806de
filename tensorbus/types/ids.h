#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace tensorbus {

/// A number that cannot be confused with another kind of number.
template <typename Tag>
struct Id {
  std::uint64_t value = 0;

  friend auto operator<=>(const Id&, const Id&) = default;
};

/// A channel's version: grows only, immutable once published.
using Version = Id<struct VersionTag>;
/// Grows when a channel's producer restarts or changes its layout.
using ChannelEpoch = Id<struct ChannelEpochTag>;
/// One transfer of one version to one replica; a retry is a new session.
using SessionId = Id<struct SessionTag>;

enum class Role : std::uint8_t { kProducer = 1, kConsumer = 2 };

/// How a consumer's new bytes become live.
enum class FlipMode : std::uint8_t {
  kInPlace = 1,  ///< written straight into live memory; the engine is fenced meanwhile
  kShadow = 2,   ///< written into a second copy; live memory is touched at the flip only
};

/// What a session proves before it flips. Each level includes what the ones before it catch.
enum class Proof : std::uint8_t {
  kOff = 1,       ///< byte counts only; for measuring
  kStream = 2,    ///< bytes read at the source against receipts made at publish
  kReadback = 3,  ///< and every written target byte read back through the target's own addresses
  kMemory = 4,    ///< and all of the target's memory once more after the last byte
};

/// How an agent reaches a worker's memory.
enum class MemoryMode : std::uint8_t {
  kMapped = 1,  ///< the agent maps it
  kCma = 2,     ///< private memory, through process_vm_readv/writev
  kBucket = 3,  ///< packed and unpacked by the worker through shared buckets
};

/// Which process of which job: what a worker says it is.
struct RankIdentity {
  std::string channel;
  std::string job;
  Role role = Role::kConsumer;
  std::uint32_t replica = 0;  ///< always 0 for a producer
  std::uint32_t rank = 0;     ///< inside the job (producer) or the replica (consumer)
  std::uint32_t rank_count = 0;

  friend bool operator==(const RankIdentity&, const RankIdentity&) = default;
  /// "policy/trainer rank 1 of 4", "policy/engine replica 0 rank 2 of 8": for messages.
  std::string ToString() const;
};

}  // namespace tensorbus

template <typename Tag>
struct std::hash<tensorbus::Id<Tag>> {
  std::size_t operator()(const tensorbus::Id<Tag>& id) const noexcept {
    return std::hash<std::uint64_t>{}(id.value);
  }
};
