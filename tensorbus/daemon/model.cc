#include "tensorbus/daemon/model.h"

#include <algorithm>
#include <fmt/format.h>

namespace tensorbus::daemon {

std::string_view SelectorName(Selector selector) {
  switch (selector) {
    case Selector::kLatest:
      return "latest";
    case Selector::kNext:
      return "next";
    case Selector::kPinned:
      return "pinned";
  }
  return "?";
}

std::string_view FlipName(FlipMode flip) {
  return flip == FlipMode::kShadow ? "shadow" : "in_place";
}

std::string_view ProofName(Proof proof) {
  switch (proof) {
    case Proof::kOff:
      return "off";
    case Proof::kStream:
      return "stream";
    case Proof::kReadback:
      return "readback";
    case Proof::kMemory:
      return "memory";
  }
  return "?";
}

std::string_view MemoryModeName(MemoryMode mode) {
  switch (mode) {
    case MemoryMode::kMapped:
      return "mapped";
    case MemoryMode::kCma:
      return "cma";
    case MemoryMode::kBucket:
      return "bucket";
  }
  return "?";
}

RankKey KeyOf(const RankIdentity& identity) {
  return {.channel = identity.channel,
          .job = identity.job,
          .role = identity.role,
          .replica = identity.replica,
          .rank = identity.rank};
}

bool Replica::dirty() const {
  return std::any_of(ranks.begin(), ranks.end(),
                     [](const auto& entry) { return entry.second.dirty; });
}

Version Replica::live() const {
  if (ranks.empty()) return {};
  const Version first = ranks.begin()->second.live;
  for (const auto& [rank, state] : ranks) {
    if (state.live != first) return {};
  }
  return first;
}

std::string ReplicaName(const Channel& channel, const Replica& replica) {
  return fmt::format("{}/{} replica {}", channel.name, replica.job, replica.replica);
}

std::string ProducerRankName(const Channel& channel, std::uint32_t rank) {
  return RankIdentity{.channel = channel.name,
                      .job = channel.producer.job,
                      .role = Role::kProducer,
                      .replica = 0,
                      .rank = rank,
                      .rank_count = channel.producer.rank_count}
      .ToString();
}

std::string ReplicaRankName(const Channel& channel, const Replica& replica, std::uint32_t rank) {
  return RankIdentity{.channel = channel.name,
                      .job = replica.job,
                      .role = Role::kConsumer,
                      .replica = replica.replica,
                      .rank = rank,
                      .rank_count = replica.rank_count}
      .ToString();
}

}  // namespace tensorbus::daemon
