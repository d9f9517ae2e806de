#pragma once

#include <compare>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tensorbus/base/executor.h"
#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/daemon/coverage.h"
#include "tensorbus/types/box_sum.h"
#include "tensorbus/types/ids.h"
#include "tensorbus/types/layout.h"

// What the daemon knows: plain values, changed only by Core on its executor.
namespace tensorbus::daemon {

/// Bounds: what exceeds them is refused with kResourceExhausted/kBusy or forgotten, oldest first.
inline constexpr std::size_t kMaxAgents = 4096;
inline constexpr std::size_t kMaxChannels = 1024;  ///< empty ones are forgotten to make room
inline constexpr std::size_t kMaxReplicasOfChannel = 4096;
inline constexpr std::size_t kMaxKeptVersions = 64;      ///< per channel, being published included
inline constexpr std::size_t kMaxReleasedVersions = 16;  ///< per channel, remembered for status
inline constexpr std::size_t kMaxRunningSessions = 4096;
inline constexpr std::size_t kMaxEndedSessions = 64;  ///< remembered for status
inline constexpr std::size_t kMaxKnownPlans = 1024;   ///< digests remembered for a quick start
inline constexpr std::size_t kMaxPendingQueries = 4096;
inline constexpr std::size_t kMaxTraceEvents = 4096;
inline constexpr std::size_t kMaxListedFaults = 32;

/// What a slow consumer may cost the producer; numbers as on the worker's socket.
enum class SlowConsumer : std::uint8_t { kWait = 1, kSkip = 2, kSnapshot = 3 };
/// Which version a replica asks for; numbers as on the worker's socket.
enum class Selector : std::uint8_t { kLatest = 1, kNext = 2, kPinned = 3 };

std::string_view SelectorName(Selector selector);
std::string_view FlipName(FlipMode flip);
std::string_view ProofName(Proof proof);
std::string_view MemoryModeName(MemoryMode mode);

/// Finds a rank in the tables; one process at a time has one.
struct RankKey {
  std::string channel;
  std::string job;
  Role role = Role::kConsumer;
  std::uint32_t replica = 0;
  std::uint32_t rank = 0;

  friend auto operator<=>(const RankKey&, const RankKey&) = default;
};
RankKey KeyOf(const RankIdentity& identity);

/// A job's layout with what is derived from it. Immutable; shared by everything that refers to the
/// layout, sessions included.
struct LayoutEntry {
  explicit LayoutEntry(JobLayout combined) : layout(std::move(combined)), index(layout) {}
  LayoutEntry(const LayoutEntry&) = delete;
  LayoutEntry& operator=(const LayoutEntry&) = delete;

  const JobLayout layout;
  const TensorIndex index;
  Hash128 hash;
  std::string blob;                       ///< Serialize(layout)
  std::vector<std::uint64_t> rank_bytes;  ///< bytes each rank holds
  std::vector<BoxSum> rank_boxes;         ///< what each rank holds
  std::uint64_t bytes = 0;                ///< logical bytes of all tensors
};

/// A consumer rank's wish for a version.
struct Request {
  std::uint64_t id = 0;
  Selector selector = Selector::kLatest;
  Version version;  ///< for kPinned
  TimePoint since;
  TimePoint deadline;
  Executor::TimerId timer = 0;
};

/// One registered process of a job.
struct RankState {
  RankIdentity identity;
  std::string agent;
  std::uint32_t pid = 0;
  MemoryMode mode = MemoryMode::kMapped;
  /// Serialize(RankLayout), checked; parsed away from the executor whenever it is needed.
  std::shared_ptr<const std::string> layout_blob;
  Hash128 layout_hash;
  std::uint64_t bytes = 0;

  // Consumers.
  std::vector<std::string> leave_out;
  FlipMode flip = FlipMode::kInPlace;
  Proof proof = Proof::kReadback;
  Version live;
  bool dirty = false;
  /// The session that made it dirty, as long as the rank's agent has not said what that left
  /// behind.
  SessionId doubt;
  std::optional<Request> request;

  // Producers.
  Version published;   ///< the newest this process published
  Version unanswered;  ///< when it came back: what it published without hearing how that ended
};

/// Recognises a process that comes back, for example through a new agent.
struct ProcessMark {
  std::string host;
  std::uint32_t pid = 0;
  Hash128 layout_hash;

  friend bool operator==(const ProcessMark&, const ProcessMark&) = default;
};

/// That a rank which was there is gone.
struct Departure {
  TimePoint when;
  std::string why;  ///< bounded
};
using Departures = std::map<std::uint32_t, Departure>;  ///< by rank; of ranks not back since

/// The producing side of a channel: one generation of one job.
struct Producer {
  std::string job;  ///< "" before the first
  std::uint32_t rank_count = 0;
  std::map<std::uint32_t, RankState> ranks;
  std::map<std::uint32_t, ProcessMark> marks;  ///< of this generation, also of ranks that left
  Departures left;                             ///< of this generation
  TimePoint began;                             ///< when the generation's first rank came
  /// Names the work that puts the ranks' layouts together now; 0 for none.
  std::uint64_t assembly = 0;
  bool fresh = false;   ///< begun by a new process in this daemon's life, not by one that came back
  Version begun_above;  ///< fresh: the channel's newest version then
  std::set<std::uint32_t> told;               ///< ranks that began and heard of `begun_above`
  std::shared_ptr<const LayoutEntry> layout;  ///< once all ranks are there

  bool complete() const { return layout != nullptr; }
};

/// Why a rank of the producer may not write its memory yet.
struct ReleaseWait {
  TimePoint since;
  Executor::TimerId timer = 0;
};

using ReplicaKey = std::pair<std::string, std::uint32_t>;  ///< job, replica

/// A version that is being published or is kept.
struct VersionState {
  Version version;
  SlowConsumer policy = SlowConsumer::kWait;
  std::uint32_t min_replicas = 1;
  std::uint32_t keep_last = 0;
  std::set<std::uint32_t> published;  ///< ranks that hold it; all of them are registered
  std::set<ReplicaKey> taken;  ///< replicas that flipped to it, also those that have left since
  bool readable = false;
  bool closing = false;    ///< takes no new session: its memory is asked back
  bool held_over = false;  ///< published to an earlier daemon; its ranks brought it back
  TimePoint since;         ///< first rank's publish
  std::map<std::uint32_t, ReleaseWait> waits;

  bool snapshot() const { return policy == SlowConsumer::kSnapshot; }
};

/// What is remembered of a version that is gone, and that its ranks may bring back.
struct ReleasedVersion {
  Version version;
  std::set<ReplicaKey> taken;
  bool snapshot = false;
  std::uint32_t published_ranks = 0;
  TimePoint since;
};

/// One engine: the ranks that flip together.
struct Replica {
  std::string job;
  std::uint32_t replica = 0;
  std::uint32_t rank_count = 0;
  std::map<std::uint32_t, RankState> ranks;
  Departures left;                            ///< since its first rank came
  TimePoint began;                            ///< when that was
  std::shared_ptr<const LayoutEntry> layout;  ///< once all ranks are there
  Status fault;                               ///< why its layout cannot be served
  /// Names the work that puts its layouts together or compares them with the channel's; 0 for none.
  /// Until it is done no session opens.
  std::uint64_t assembly = 0;
  SessionId session;                ///< running; 0 for none
  std::uint64_t session_count = 0;  ///< opened for it so far

  bool complete() const { return layout != nullptr; }
  bool dirty() const;
  /// What all ranks serve; 0 when none does or they differ.
  Version live() const;
};

/// A named stream of versions.
struct Channel {
  std::string name;
  ChannelEpoch epoch;
  Version newest;  ///< greatest number ever seen: the next version must be above it
  Producer producer;
  std::map<ReplicaKey, Replica> replicas;
  std::map<Version, VersionState> versions;  ///< being published or kept
  std::deque<ReleasedVersion> released;
  TimePoint used;    ///< when a rank last came or went
  Version rollback;  ///< what replicas get until something newer is published; 0 for none

  /// No rank is here and no version is kept.
  bool empty() const { return producer.ranks.empty() && replicas.empty() && versions.empty(); }
};

/// "policy/engine replica 0": for messages.
std::string ReplicaName(const Channel& channel, const Replica& replica);
/// "policy/trainer rank 1 of 4".
std::string ProducerRankName(const Channel& channel, std::uint32_t rank);
/// "policy/engine replica 0 rank 2 of 3".
std::string ReplicaRankName(const Channel& channel, const Replica& replica, std::uint32_t rank);

}  // namespace tensorbus::daemon
