#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/planning.h"
#include "agent/rank.h"
#include "agent/session_host.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::agent {

/// What a session is, as Prepare said it. Plain values.
struct SessionSpec {
  SessionId id;
  std::string channel;
  ChannelEpoch epoch;
  Version version;
  std::string source_job;
  std::string target_job;
  std::uint32_t replica = 0;
  Hash128 source_layout;
  Hash128 target_layout;
  std::vector<SessionParticipant> participants;
  FlipMode flip = FlipMode::kInPlace;
  Proof proof = Proof::kReadback;
  bool from_snapshot = false;
  Nanos timeout{};
  Hash128 plan_digest;  ///< with `go`: start at once if ours is equal
  bool go = false;
  transport::Capability capability;  ///< of this session; never logged

  RankKey SourceKey(std::uint32_t rank) const { return {channel, source_job, 0, rank}; }
  RankKey TargetKey(std::uint32_t rank) const { return {channel, target_job, replica, rank}; }
};

/// One transfer of one version to one replica, as far as this agent's ranks take part.
///
/// The life of a session: Prepare (layouts, plan, certificate, binding, receipts; sources are
/// exposed) → Go (in_place workers are fenced, routes pulled, bytes proven) → Finish (sources
/// closed, write counters compared) → FlipPrepare (shadow workers stop) → FlipCommit (shadow
/// copied, workers told) → Ended. A failure or Abort at any point stops the copies first and only
/// then says what it left behind: in_place memory that has seen a byte is dirty, a shadow replica's
/// live memory is untouched unless the commit had begun.
///
/// Threads: confined to the executor. Lifetime: its callbacks keep it alive; the table that owns it
/// may drop it once `over()`.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(SessionSpec spec, SessionHost& host);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void Prepare();
  void Go();
  void Finish();
  void FlipPrepare();
  void FlipCommit();
  void Abort(const Status& why);
  void Ended(double seconds);
  /// Nothing more will be heard about this session. Aborts it, unless it is flipping already: that
  /// is finished, and the next registration says what is live.
  void DaemonLost(const Status& why);
  /// Closes what is open and waits for it: for an agent that stops.
  void Shutdown();
  /// A rank of this agent is gone; the session fails if it takes part.
  void RankLeft(const Rank& rank, const std::string& why);

  const SessionSpec& spec() const { return spec_; }
  /// Nothing runs any more and nothing is expected.
  bool over() const { return over_; }
  std::string_view phase_name() const;

 private:
  enum class Phase {
    kPreparing,
    kReady,
    kMoving,
    kVerified,
    kStopping,
    kFlipReady,
    kCommitting,
    kFlipped,
    kFailed
  };

  struct SourcePart {
    std::shared_ptr<Rank> rank;
    std::shared_ptr<const MemoryAccess> memory;  ///< live, or a snapshot
    std::shared_ptr<const BoundRoutes> routes;
    bool exposed = false;
  };

  struct TargetPart {
    std::shared_ptr<Rank> rank;
    std::shared_ptr<const MemoryAccess> memory;  ///< live, or the shadow
    std::shared_ptr<const BoundRoutes> routes;
    std::vector<transport::PullResult> results;  ///< by route
    std::size_t pulled = 0;
    bool started = false;  ///< a byte may have been written to `memory`
    bool verified = false;
    bool committing = false;  ///< live memory of a shadow replica may have changed
    bool flip_ready = false;
    bool flipped = false;  ///< live memory is the new version, whole
    bool told = false;     ///< the engine answered kLive
    std::uint64_t bytes = 0;
    DigestSum digest;
    Nanos first_byte = Nanos::max();
    Nanos last_byte{};
  };

  /// A route that waits to be pulled.
  struct PendingPull {
    std::size_t part = 0;
    std::size_t route = 0;
    TimePoint give_up;  ///< until then, "not exposed yet" is a reason to try again
    Nanos retry_delay = std::chrono::milliseconds(1);
  };

  // Preparing (session_prepare.cc).
  Status FindParts();
  void FetchLayout(bool source);
  void LayoutsThere();
  void PlanThere(std::shared_ptr<const PreparedPlan> plan);
  void BindAll();
  Status CheckOwnPart() const;
  void MakeReceipts(std::size_t part);
  void Ready();
  void Expose();

  // Moving (session_move.cc).
  void StartPulls();
  std::uint32_t SourceOf(const PendingPull& pull) const;
  void PullNext();
  void StartPull(PendingPull pull, bool more_follow);
  void PullDone(PendingPull pull, Result<transport::PullResult> result);
  Status CheckRoute(const TargetPart& part, const BoundRoute& route,
                    const transport::PullResult& result) const;
  Status NameFault(const TargetPart& part, const BoundRoute& route, const Status& failure) const;
  /// The copy op that a block of a route is.
  CopyOp OpOf(const BoundRoute& route, std::size_t block) const;
  Status BlockFault(const TargetPart& part, const BoundRoute& route, std::size_t block) const;
  const RouteSums* SumsOf(const SourcePart& part) const;
  const std::vector<DigestSum>* ReceiptOf(const BoundRoute& target_route) const;
  void PartPulled(std::size_t part);
  void CheckMemory(std::size_t part);
  void PartVerified(std::size_t part);
  void SourceClosed(std::size_t part);

  // Flip and end (session.cc).
  void CommitPart(std::size_t part);
  void PartLive(std::size_t part, TimePoint begin);
  void Fail(Status why);
  void StopCopies();
  void CheckDrained();
  void MarkDirty(proto::SessionFailed* failed);
  void WithdrawAll(std::function<void()> done);
  void CloseOver();
  void Detach();
  void TellUpdated(TargetPart& part, double seconds);

  const SessionParticipant* ParticipantOfSource(std::uint32_t rank) const;
  const SessionParticipant* ParticipantOfTarget(std::uint32_t rank) const;
  bool IsOwn(const SessionParticipant* participant) const;
  transport::Transport* TransportTo(const SessionParticipant* participant) const;
  transport::RouteKey KeyOf(const BoundRoute& route) const;
  std::string TrackOf(const Rank& rank) const;
  void CallHook(std::size_t part, wire::MessageType hook, std::function<void()> then);
  void Trace(std::string name, std::string track, std::uint64_t begin_ns, std::uint64_t bytes);
  /// The trace ring, with what was under way, into a file.
  std::string DumpTrace(const Status& why);
  bool running() const { return phase_ != Phase::kFailed && !over_; }
  Nanos TimeLeft() const;

  const SessionSpec spec_;
  SessionHost& host_;
  Phase phase_ = Phase::kPreparing;
  TimePoint deadline_;
  std::uint64_t phase_begin_ns_ = 0;
  Executor::TimerId deadline_timer_ = 0;

  std::vector<SourcePart> sources_;
  std::vector<TargetPart> targets_;
  PlanKey plan_key_;
  std::shared_ptr<const JobLayout> source_layout_;
  std::shared_ptr<const JobLayout> target_layout_;
  std::shared_ptr<const PreparedPlan> plan_;

  std::size_t fenced_ = 0;  ///< targets that answered their fence
  std::deque<PendingPull> waiting_;
  std::size_t in_flight_ = 0;  ///< pulls that have not said Done
  std::size_t busy_ = 0;       ///< work pool jobs that use our memory
  bool going_ = false;
  bool finishing_ = false;
  bool over_ = false;
  bool abort_came_ = false;
  bool detached_ = false;  ///< the daemon was lost while we flipped
  bool drained_ = false;
  bool report_ = false;
  Status failure_;
};

/// The failure of a session that read memory its publisher changed; `where` names tensor and box if
/// known.
Status WrittenDuringPublish(const Rank& rank, Version version, const std::string& where);

/// What a worker is told whose live memory is a mixture.
Status DirtyStatus(const Rank& rank, const Status& cause);

}  // namespace tensorbus::agent
