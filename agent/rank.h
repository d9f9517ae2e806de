#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "agent/binding.h"
#include "agent/bucket_channel.h"
#include "agent/memory_access.h"
#include "agent/planning.h"
#include "agent/worker_server.h"
#include "tensorbus/base/mapping.h"
#include "tensorbus/types/ids.h"
#include "worker_shim/wire.h"

namespace tensorbus::agent {

/// Names one rank on the whole bus.
struct RankKey {
  std::string channel;
  std::string job;
  std::uint32_t replica = 0;
  std::uint32_t rank = 0;

  friend auto operator<=>(const RankKey&, const RankKey&) = default;
  static RankKey Of(const RankIdentity& identity) {
    return {identity.channel, identity.job, identity.replica, identity.rank};
  }
};

using BoundRoutes = std::vector<BoundRoute>;

/// Per route of one binding, per block of the route.
using RouteSums = std::vector<std::vector<DigestSum>>;

/// Sums that a source made of one version at publish, for every plan it was bound to.
struct PublishReceipts {
  std::map<PlanKey, RouteSums> routes;
  /// Per piece; only when no plan was bound yet at publish.
  std::vector<DigestSum> pieces;
};

/// Everything this agent knows of one registered worker process.
///
/// Threads: confined to the agent's executor, except what its shared pointers point to, which is
/// immutable.
struct Rank {
  RankIdentity identity;
  ConnectionId connection;
  PeerProcess peer;

  // Since kHello.
  std::shared_ptr<const Mapping> page_mapping;  ///< shared with the rank that registers anew here
  wire::ControlPage* page = nullptr;
  std::optional<SegmentCollector> segments;
  Status attach_failure;  ///< first failed kAttachSegment that nobody was told of

  // Since kRegister.
  bool registering = false;
  bool registered = false;  ///< the daemon knows it
  std::shared_ptr<const MemoryAccess> memory;
  std::shared_ptr<BucketChannel> buckets;      ///< ranks with private memory
  std::shared_ptr<const MemoryAccess> shadow;  ///< consumers with FlipMode::kShadow
  std::shared_ptr<const PieceIndex> pieces;
  std::string layout;  ///< Serialize(RankLayout), for every registration with a daemon
  FlipMode flip = FlipMode::kInPlace;
  Proof proof = Proof::kReadback;
  std::vector<std::string> leave_out;
  ChannelEpoch epoch;

  // Consumers.
  Version live_version;
  bool dirty = false;
  std::optional<SessionId> target_of;  ///< the session that writes to it now
  std::uint64_t target_count = 0;      ///< sessions so far that it was the target of

  // Producers.
  Version published;
  std::uint64_t write_count_at_publish = 0;
  /// A session of this channel has asked for proof `stream`: receipts are made at every publish.
  bool wants_receipts = false;
  std::map<Version, PublishReceipts> receipts;  ///< of `published` and of snapshots
  std::map<Version, std::shared_ptr<const MemoryAccess>> snapshots;
  /// How these were published, for a daemon that does not know them.
  std::map<Version, wire::Publish> publishes;
  /// A publish whose end nobody heard: the daemon may or may not have accepted it.
  Version unanswered;
  /// Memory of a dropped snapshot, kept so that the next one needs no fresh pages.
  std::shared_ptr<const MemoryAccess> spare_snapshot;

  /// Routes bound to this rank's memory, by plan.
  RecentCache<PlanKey, BoundRoutes> bound{4};

  std::string Name() const { return identity.ToString(); }
  bool is_producer() const { return identity.role == Role::kProducer; }
  /// Whether live memory is what was published last, and nobody was told that it may change.
  bool holds_published() const {
    return published.value != 0 && write_count() == write_count_at_publish &&
           page->released_version.load(std::memory_order_relaxed) < published.value;
  }
  std::uint64_t write_count() const { return page->write_count.load(std::memory_order_acquire); }
};

}  // namespace tensorbus::agent
