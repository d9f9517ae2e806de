#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/status.h"
#include "tensorbus/daemon/model.h"
#include "tensorbus/types/box_sum.h"
#include "tensorbus/types/strided.h"

namespace tensorbus::daemon {

/// What goes between one source rank and one target rank, as both ends counted it.
struct Route {
  DigestSum source;
  DigestSum target;
  BoxSum boxes;
  std::uint64_t located = 0;  ///< see proto::RouteReceipt
};

/// One transfer of one version to one replica, as the daemon follows it:
///
///   preparing → moving → finishing → flipping → committing → done
///
/// Inputs are what agents report; each gives the next step to take, or the failure that ends the
/// session. It sends nothing itself. Confined; no clock, no I/O.
class Session {
 public:
  enum class State { kPreparing, kMoving, kFinishing, kFlipping, kCommitting, kDone, kFailed };
  /// What everybody has to be told now.
  enum class Step { kNone, kGo, kFinish, kFlipPrepare, kFlipCommit, kEnd };

  struct Participant {
    std::string agent;
    std::string host;
    std::vector<std::string> endpoints;
    std::vector<std::uint32_t> source_ranks;  ///< sorted
    std::vector<std::uint32_t> target_ranks;  ///< sorted
  };

  struct Config {
    SessionId id;
    std::string channel;
    ChannelEpoch epoch;
    Version version;
    std::string source_job;
    std::string target_job;
    std::uint32_t replica = 0;
    std::shared_ptr<const LayoutEntry> source;
    std::shared_ptr<const LayoutEntry> target;
    std::vector<Participant> participants;  ///< sorted by agent
    FlipMode flip = FlipMode::kInPlace;
    Proof proof = Proof::kReadback;
    bool from_snapshot = false;
    std::string capability;  ///< secret that lets its agents read its routes; never logged
    /// Known from an earlier session of the same plan: no round of Ready and Go is needed.
    std::optional<Hash128> plan_digest;
    TimePoint started;
    TimePoint deadline;
  };

  explicit Session(Config config);

  const Config& config() const { return config_; }
  State state() const { return state_; }
  /// Whether target memory may have been written.
  bool started() const { return state_ != State::kPreparing; }
  const std::optional<Hash128>& plan_digest() const { return digest_; }
  std::uint64_t bytes() const { return bytes_; }

  /// The participant that an agent is; null for strangers.
  const Participant* Find(const std::string& agent) const;
  /// The opening message, for every participant the same.
  proto::Prepare PrepareMessage(Nanos timeout) const;

  // Each fails with what ends the session: kPlanMismatch, kChecksumMismatch naming the route,
  // kWriteDuringPublish naming route, tensor and box, kStaleVersion for a receipt of another
  // version or epoch, kMalformed for reports that make no sense (unknown rank, twice, not this
  // agent's).
  Result<Step> OnReady(const std::string& agent, const Hash128& plan_digest);
  Result<Step> OnReceipt(const std::string& agent, const proto::SessionReceipt& receipt);
  Result<Step> OnSourceDone(const std::string& agent, const proto::SourceDone& done);
  Result<Step> OnFlipReady(const std::string& agent, std::uint32_t target_rank);
  Result<Step> OnFlipDone(const std::string& agent, std::uint32_t target_rank);
  void MarkFailed() { state_ = State::kFailed; }

  /// Who the session waits for: "policy/engine replica 0 rank 2 of 3 has not reported its receipt".
  std::vector<std::string> Missing() const;

  std::string SourceName(std::uint32_t rank) const;
  std::string TargetName(std::uint32_t rank) const;

 private:
  Status CheckOwner(const std::string& agent, const std::vector<std::uint32_t> Participant::*ranks,
                    std::uint32_t rank, const char* what) const;
  Status CheckVersion(const std::string& who, std::uint64_t version, std::uint64_t epoch) const;
  Status CheckRoute(const proto::RouteReceipt& route) const;
  Status CheckCounted(std::uint32_t source, const proto::RouteReceipt& route) const;
  /// "model.norm.weight", or that there is more than one such tensor.
  std::string Difference(const BoxSum& a, const BoxSum& b) const;
  /// What a route carries of a tensor: "model.norm.weight[0:576]".
  std::string PartOf(std::size_t tensor, std::uint32_t source, std::uint32_t target) const;
  Status Unexpected(const char* what) const;

  Config config_;
  State state_ = State::kPreparing;
  std::optional<Hash128> digest_;
  std::string digest_agent_;  // who gave it
  std::uint64_t bytes_ = 0;
  std::set<std::string> ready_;
  std::set<std::uint32_t> received_;
  std::set<std::uint32_t> source_done_;
  std::set<std::uint32_t> flip_ready_;
  std::set<std::uint32_t> flip_done_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Route> routes_;  // by source, target
};

/// "preparing", "moving", …
std::string_view StateName(Session::State state);

}  // namespace tensorbus::daemon
