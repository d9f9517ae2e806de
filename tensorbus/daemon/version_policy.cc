#include "tensorbus/daemon/version_policy.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>

namespace tensorbus::daemon {

namespace {

/// The newest version a session may be opened for; 0 for none.
Version NewestReadable(const Channel& channel) {
  for (auto it = channel.versions.rbegin(); it != channel.versions.rend(); ++it) {
    if (it->second.readable && !it->second.closing) return it->first;
  }
  return {};
}

bool Openable(const Channel& channel, Version version) {
  const auto found = channel.versions.find(version);
  return found != channel.versions.end() && found->second.readable && !found->second.closing;
}

bool Has(const Replica& replica, Version version) {
  return !replica.dirty() && replica.live() >= version;
}

/// Replicas that a waiting producer waits for.
bool Present(const Replica& replica) {
  return replica.complete() && replica.fault.ok();
}

/// Whether `wish` goes together with what other ranks published under its number, or there is room
/// for one more.
Status CheckPlace(const Channel& channel, const std::string& who, const VersionState& wish) {
  const auto known = channel.versions.find(wish.version);
  if (known == channel.versions.end()) {
    if (channel.versions.size() < kMaxKeptVersions) return {};
    return {Code::kResourceExhausted,
            fmt::format("{} keeps {} versions already; lower keep_last or let all ranks publish",
                        channel.name, channel.versions.size()),
            Reason::kBusy};
  }
  if (known->second.policy == wish.policy && known->second.keep_last == wish.keep_last &&
      known->second.min_replicas == wish.min_replicas) {
    return {};
  }
  return {Code::kInvalidArgument,
          fmt::format("{} published version {} with another policy than the ranks before it; all "
                      "ranks of a job must give the same slow-consumer policy, min_replicas and "
                      "keep_last",
                      who, wish.version.value),
          Reason::kMalformed};
}

}  // namespace

Choice ChooseVersion(const Channel& channel, Selector selector, Version wanted, Version live,
                     bool dirty) {
  if (selector == Selector::kPinned) {
    if (live == wanted && !dirty)
      return {.kind = Choice::Kind::kAlready, .version = live, .status = {}};
    if (Openable(channel, wanted)) {
      return {.kind = Choice::Kind::kOpen, .version = wanted, .status = {}};
    }
    if (channel.versions.contains(wanted) && !channel.versions.at(wanted).closing) return {};
    if (wanted > channel.newest) return {};
    return {.kind = Choice::Kind::kFail,
            .version = {},
            .status = Status(Code::kNotFound,
                             fmt::format("version {} of {} is not kept any more; kept: {}",
                                         wanted.value, channel.name, KeptVersions(channel)),
                             Reason::kStaleVersion)};
  }
  const bool back = channel.rollback.value != 0 && Openable(channel, channel.rollback);
  const Version best = back ? channel.rollback : NewestReadable(channel);
  const bool newer = back ? best != live : best > live;
  if (best.value != 0 && (newer || dirty)) {
    return {.kind = Choice::Kind::kOpen, .version = best, .status = {}};
  }
  const bool serves_latest =
      live.value != 0 && !dirty && (best.value != 0 || live >= channel.newest);
  if (selector == Selector::kLatest && serves_latest) {
    return {.kind = Choice::Kind::kAlready, .version = live, .status = {}};
  }
  return {};
}

Release DecideRelease(const Channel& channel, const VersionState& version,
                      std::size_t running_sessions) {
  if (version.snapshot()) return Release::kGrant;
  if (!version.readable) return Release::kHold;
  if (version.policy == SlowConsumer::kWait && !version.closing) {
    std::set<ReplicaKey> having = version.taken;
    for (const auto& [key, replica] : channel.replicas) {
      if (!Present(replica)) continue;
      if (!Has(replica, version.version)) return Release::kHold;
      having.insert(key);
    }
    if (having.size() < version.min_replicas) return Release::kHold;
  }
  return running_sessions == 0 ? Release::kGrant : Release::kClose;
}

std::vector<std::string> HoldersOf(const Channel& channel, const VersionState& version) {
  std::vector<std::string> holders;
  if (!version.readable) {
    for (std::uint32_t rank = 0; rank < channel.producer.rank_count; ++rank) {
      if (version.published.contains(rank)) continue;
      holders.push_back(fmt::format(
          "{} {} version {}", ProducerRankName(channel, rank),
          channel.producer.ranks.contains(rank) ? "has not published" : "has not come back with",
          version.version.value));
      if (holders.size() >= kMaxListedFaults) return holders;
    }
    return holders;
  }
  if (version.policy != SlowConsumer::kWait || version.closing) return holders;
  std::set<ReplicaKey> having = version.taken;
  for (const auto& [key, replica] : channel.replicas) {
    if (!Present(replica)) continue;
    if (Has(replica, version.version)) {
      having.insert(key);
      continue;
    }
    std::string who = ReplicaName(channel, replica);
    if (replica.session.value != 0) {
      who += " is receiving it";
    } else {
      for (const auto& [rank, state] : replica.ranks) {
        if (!state.request) {
          who = ReplicaRankName(channel, replica, rank);
          break;
        }
      }
      who += fmt::format(" has not taken version {}", version.version.value);
    }
    if (holders.size() < kMaxListedFaults) holders.push_back(std::move(who));
  }
  if (holders.empty() && having.size() < version.min_replicas) {
    holders.push_back(fmt::format("{} of at least {} replicas of {} have taken version {}",
                                  having.size(), version.min_replicas, channel.name,
                                  version.version.value));
  }
  return holders;
}

std::vector<Version> SnapshotsToDrop(const Channel& channel) {
  std::vector<Version> readable;
  std::uint32_t keep = 1;
  for (const auto& [number, version] : channel.versions) {
    if (!version.snapshot() || !version.readable) continue;
    readable.push_back(number);
    keep = std::max<std::uint32_t>(1, version.keep_last);  // the newest one's wish counts
  }
  std::vector<Version> drop;
  if (readable.size() <= keep) return drop;
  for (std::size_t i = 0; i + keep < readable.size(); ++i) {
    if (readable[i] != channel.rollback) drop.push_back(readable[i]);
  }
  return drop;
}

Status CheckNumber(const std::string& who, std::string_view did, Version version) {
  if (version.value != std::numeric_limits<std::uint64_t>::max()) return {};
  return {Code::kInvalidArgument,
          fmt::format("{} {} version {}, above which there is none; a version needs room for its "
                      "successors",
                      who, did, version.value),
          Reason::kMalformed};
}

Status CheckPublish(const Channel& channel, const RankState& rank, const VersionState& wish,
                    bool previous_is_read) {
  const std::string who = rank.identity.ToString();
  const Version version = wish.version;
  const auto known = channel.versions.find(version);
  const bool joins = known != channel.versions.end() && !known->second.readable;
  if (version.value == 0) {
    return {Code::kInvalidArgument, who + " published version 0; versions begin at 1",
            Reason::kMalformed};
  }
  TB_RETURN_IF_ERROR(CheckNumber(who, "published", version));
  const bool again = version == rank.unanswered && (known == channel.versions.end() || joins);
  if (version <= rank.published && !again) {
    return {Code::kFailedPrecondition,
            fmt::format("{} published version {} after version {}; numbers only grow", who,
                        version.value, rank.published.value),
            Reason::kStaleVersion};
  }
  if (version <= channel.newest && !joins && !again) {
    return {
        Code::kFailedPrecondition,
        fmt::format("{} published version {}, but {} is at version {} already; go on from {}", who,
                    version.value, channel.name, channel.newest.value, channel.newest.value + 1),
        Reason::kStaleVersion};
  }
  TB_RETURN_IF_ERROR(CheckPlace(channel, who, wish));
  if (previous_is_read) {
    return {
        Code::kFailedPrecondition,
        fmt::format("{} published version {} while version {} is still being read; wait for its "
                    "release first",
                    who, version.value, rank.published.value),
        Reason::kWriteDuringPublish};
  }
  return {};
}

Status CheckHeld(const Channel& channel, const RankState& rank, const VersionState& held) {
  const std::string who = rank.identity.ToString();
  if (held.version.value == 0 || held.version > rank.published) {
    return {Code::kInvalidArgument,
            fmt::format("{} holds version {}, but the newest it published is {}", who,
                        held.version.value, rank.published.value),
            Reason::kMalformed};
  }
  return CheckPlace(channel, who, held);
}

std::vector<Version> LostVersions(const Channel& channel) {
  std::vector<Version> lost;
  for (const auto& [number, version] : channel.versions) {
    const bool never =
        std::any_of(channel.producer.ranks.begin(), channel.producer.ranks.end(),
                    [&, number = number, &held = version.published](const auto& entry) {
                      return entry.second.published >= number && !held.contains(entry.first);
                    });
    if (never) lost.push_back(number);
  }
  return lost;
}

std::string KeptVersions(const Channel& channel) {
  std::string out;
  for (const auto& [number, version] : channel.versions) {
    if (!version.readable || version.closing) continue;
    out += fmt::format("{}{}", out.empty() ? "" : ", ", number.value);
  }
  return out.empty() ? "none" : out;
}

}  // namespace tensorbus::daemon
