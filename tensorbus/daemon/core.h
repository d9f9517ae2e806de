#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/daemon/assembly.h"
#include "tensorbus/daemon/daemon_metrics.h"
#include "tensorbus/daemon/digest_compare.h"
#include "tensorbus/daemon/model.h"
#include "tensorbus/daemon/session.h"
#include "tensorbus/daemon/side_work.h"
#include "tensorbus/rpc/agent_port.h"
#include "tensorbus/rpc/protocol.h"

namespace tensorbus::daemon {

/// How the daemon behaves; the defaults are those of production.
struct CoreOptions {
  std::string name = "tensorbusd";
  Nanos heartbeat = rpc::kHeartbeat;
  /// An agent that said nothing for this long is lost.
  Nanos agent_silence = std::chrono::seconds(10);
  /// After its start: how long agents and engines that an earlier daemon knew are given to come
  /// back before memory that they may want is given back. Longer than agents pause between two
  /// attempts to attach.
  Nanos return_time = std::chrono::seconds(10);
  /// Between a stream's opening and its Hello.
  Nanos hello_timeout = std::chrono::seconds(5);
  /// For requests that give no timeout of their own.
  Nanos default_timeout = std::chrono::seconds(60);
  /// For work on layouts that is done away from the executor.
  Nanos work_timeout = std::chrono::minutes(5);
  /// How long agents have to answer questions of tensorbusctl.
  Nanos query_timeout = std::chrono::seconds(4);
  /// Sessions are numbered from here on: different in every life of the daemon, so that what is
  /// left of an old session is never taken for a new one.
  std::uint64_t first_session = 1;
  std::string data_token = {};
};

/// The daemon's one state machine: who is there, which versions exist, which sessions run.
///
/// Everything comes in as calls on its executor and goes out as messages to agents or as one answer
/// per question. After each change of a channel Reconcile() takes every step that has become
/// possible: sessions open, memory is given back, snapshots are dropped.
///
/// Threads: confined to the executor. Timers and queued tasks refer to it: it must outlive the
/// executor's running.
class Core final : public rpc::ControlHandler, public rpc::AdminHandler {
 public:
  /// Borrows all three: they outlive it.
  Core(CoreOptions options, Executor& executor, SideWork& side_work, DaemonMetrics& metrics);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  ~Core() override;

  // rpc::ControlHandler
  void OnAttach(rpc::PortId port, std::shared_ptr<rpc::AgentPort> agent,
                const std::string& peer) override;
  void OnMessage(rpc::PortId port, const proto::AgentMessage& message) override;
  void OnDetach(rpc::PortId port, const Status& why) override;
  void OnGetLayout(const Hash128& hash, OnLayout done) override;

  // rpc::AdminHandler
  void GetStatus(const proto::StatusRequest& request, Done<proto::StatusReply> done) override;
  void GetVersions(const proto::VersionsRequest& request, Done<proto::VersionsReply> done) override;
  void Rollback(const proto::RollbackRequest& request, Done<proto::RollbackReply> done) override;
  void Explain(const proto::ExplainRequest& request, Done<proto::ExplainReply> done) override;
  void WhoIsMissing(const proto::WhoIsMissingRequest& request,
                    Done<proto::WhoIsMissingReply> done) override;
  void Verify(const proto::VerifyRequest& request, Done<proto::VerifyReply> done) override;
  void Trace(const proto::TraceRequest& request, Done<proto::TraceReply> done) override;

  /// Numbers of what is alive, for tests that look for leaks.
  struct Counts {
    std::size_t agents = 0;
    std::size_t ranks = 0;
    std::size_t sessions = 0;
    std::size_t queries = 0;
    std::size_t kept_versions = 0;
    std::size_t registrations = 0;  ///< that are being looked at
  };
  Counts counts() const;

 private:
  struct Port {
    std::shared_ptr<rpc::AgentPort> port;
    std::string peer;
    std::string agent;  ///< "" before Welcome
    TimePoint last_heard;
    std::optional<proto::Hello> waiting = {};  ///< for its name, which another stream has
  };
  struct Agent {
    std::string name;
    std::string host;
    std::uint32_t pid = 0;
    std::vector<std::string> endpoints;
    rpc::PortId port;
    std::set<RankKey> ranks;
  };
  struct RunningSession {
    Session session;
    Executor::TimerId timer = 0;
    TimePoint phase_since;
    std::uint64_t realtime_begin_ns = 0;
  };
  struct PendingQuery {
    std::string agent;
    std::function<void(Result<proto::Answer>)> done;
    Executor::TimerId timer = 0;
  };

  // core_agents.cc: streams, Hello, silence, dispatch, questions to agents.
  void CheckSilence();
  void Greet(rpc::PortId id, const proto::Hello& hello);
  void Refuse(rpc::PortId id, const Status& status);
  void Admit(rpc::PortId id, const proto::Hello& hello);
  void AwaitName(rpc::PortId id, const proto::Hello& hello);
  void DecideName(rpc::PortId id, TimePoint asked);
  void Dispatch(Agent& agent, const proto::AgentMessage& message);
  void DropPort(rpc::PortId id, const Status& why);
  void AgentGone(const std::string& name, const Status& why);
  void SendTo(const std::string& agent, proto::DaemonMessage message);
  void Ask(const std::string& agent, proto::Query query, Nanos timeout,
           std::function<void(Result<proto::Answer>)> done);
  void OnAnswer(const Agent& agent, const proto::Answer& answer);
  void UpdateGauges();

  /// A registration that is being looked at. Its layout is parsed and checked away from the
  /// executor; when it completes its job, so is putting the job's layout together.
  struct Registering {
    std::uint64_t number = 0;  ///< tells it from an earlier one of the same rank
    std::string agent;
    std::shared_ptr<const proto::RegisterRank> message;
    RankIdentity identity;
    std::shared_ptr<const LayoutEntry> manifest;  ///< what its layout is compared with; may be null
    SideWork::Ticket ticket = 0;
  };

  // core_registering.cc: from a RegisterRank to its answer.
  void OnRegister(Agent& agent, const proto::RegisterRank& message);
  void CheckRegistering(const RankKey& key);
  void Enter(const RankKey& key, const Result<RankSummary>& checked);
  void EndRegistering(const RankKey& key, const Status& status);
  void AnswerRegister(const std::string& agent, std::uint64_t request, const RankIdentity* identity,
                      const Status& status);
  static Version LatestFor(const Channel& channel, const RankIdentity& identity);
  void AssembleProducer(Channel& channel, const RankKey& last);
  void ProducerAssembled(std::uint64_t number, const RankKey& last,
                         Result<std::shared_ptr<const LayoutEntry>> assembled);
  void AssembleReplica(Channel& channel, Replica& replica, const RankKey& last);
  void ReplicaAssembled(std::uint64_t number, const RankKey& last,
                        const std::shared_ptr<const LayoutEntry>& manifest,
                        Result<std::shared_ptr<const LayoutEntry>> assembled);
  void Superseded(const RankKey& last);
  void CheckReplicas(Channel& channel);
  void StartReplicaCheck(Channel& channel, Replica& replica);
  void ReplicaChecked(std::uint64_t number, const std::string& channel, const ReplicaKey& key,
                      const Status& fault);

  // core_ranks.cc: who registers where, generations of a producer, leaving.
  Status Register(Agent& agent, const Registering& registering, const RankSummary& summary);
  Result<ChannelEpoch> RaisedEpoch(const Channel& channel,
                                   const proto::RegisterRank& message) const;
  Status RegisterProducer(Agent& agent, Channel& channel, RankState rank,
                          const proto::RegisterRank& message);
  Status RegisterConsumer(Channel& channel, RankState rank, const proto::RegisterRank& message);
  void BeginGeneration(Channel& channel, const RankIdentity& identity, const std::string& why);
  void ForgetIfEmpty(const std::string& channel);
  Status MakeRoomForChannel();
  void OnLeave(Agent& agent, const proto::LeaveRank& message);
  /// `may_return`: its process may live on, and come back with what it holds.
  void RankGone(const RankKey& key, const Status& why, bool may_return);
  Departure DepartureOf(const Status& why) const;
  void ProducerRankGone(Channel& channel, std::uint32_t rank, const Status& why, bool may_return);
  RankState* FindRank(const RankKey& key);
  /// The rank if it is registered through this agent; null otherwise.
  RankState* FindOwn(const Agent& agent, const RankIdentity& identity);
  std::shared_ptr<const LayoutEntry> Share(std::shared_ptr<const LayoutEntry> entry);

  // core_versions.cc: publishing, giving memory back, keeping snapshots.
  void OnPublish(Agent& agent, const proto::Publish& message);
  Status Publish(Agent& agent, const RankIdentity& identity, const proto::Publish& message);
  /// A producer rank came back: what it still holds counts as published by it again.
  void TakeBack(Channel& channel, std::uint32_t rank, const proto::RegisterRank& message);
  /// Until the rank is back, nothing that it published can be read.
  void Suspend(Channel& channel, std::uint32_t rank);
  void ShowReadable(Channel& channel);
  void DropSnapshot(const RankState& rank, Version version);
  /// Whether replicas that may want it can still be on their way here from an earlier daemon.
  bool AwaitsReturns(const VersionState& version) const;
  void OnRequestRelease(Agent& agent, const proto::RequestRelease& message);
  void ReleaseTimedOut(const std::string& channel, Version version, std::uint32_t rank);
  void TryRelease(Channel& channel, VersionState& version, std::vector<Version>& gone);
  void AnswerRelease(Channel& channel, std::uint32_t rank, Version version, const Status& status);
  /// The version is over: whoever waits for its memory gets it.
  void Retire(Channel& channel, Version version);
  void DropSnapshots(Channel& channel);
  std::size_t SessionsReading(const Channel& channel, Version version) const;

  // core_requests.cc: wishes of replicas, opening sessions.
  void OnRequestVersion(Agent& agent, const proto::RequestVersion& message);
  Status AcceptRequest(Agent& agent, const RankIdentity& identity,
                       const proto::RequestVersion& message);
  void OnCancelRequest(Agent& agent, const proto::CancelRequest& message);
  void RequestTimedOut(const RankKey& key, std::uint64_t request);
  void EndRequest(RankState& rank, const Status& status, Version live);
  void EndRequests(Replica& replica, const Status& status, Version live);
  void TryOpen(Channel& channel, Replica& replica);
  void OpenSession(Channel& channel, Replica& replica, const VersionState& version);
  std::vector<Session::Participant> ParticipantsOf(const Channel& channel,
                                                   const Replica& replica) const;
  void Reconcile(Channel& channel);
  void ReconcileLater(const std::string& channel);

  // core_sessions.cc: a session's way.
  void OnSessionMessage(Agent& agent, const proto::AgentMessage& message);
  Result<Session::Step> Feed(Session& session, const std::string& agent,
                             const proto::AgentMessage& message);
  void TakeStep(RunningSession& running, Session::Step step);
  void EndPhase(RunningSession& running, const char* name, Histogram* seconds);
  void SendToParticipants(const Session& session, const proto::DaemonMessage& message,
                          bool sources_only, bool targets_only);
  void FinishSession(SessionId id);
  void AbortSession(SessionId id, Status why, const Agent* agent = nullptr,
                    const proto::SessionFailed& report = {});
  void OnLeftBehind(const Agent& agent, const proto::SessionFailed& report);
  void SessionTimedOut(SessionId id);
  void CloseSession(SessionId id, const Status& status);
  void AbortSessionsOf(const RankKey& key, const Status& why);
  Hash128 PlanKey(const Session::Config& config) const;
  void AddTrace(const Session& session, const char* name, std::uint64_t begin_ns);

  // core_missing.cc: who is waited for.
  struct Missing {
    std::string what;
    std::string who;
    std::string why;
    std::string remedy;
    TimePoint since;
  };
  /// Bounded; empty also before any producer.
  std::vector<Missing> AbsentProducerRanks(const Channel& channel) const;
  /// Why the channel has no complete producer now: "policy/trainer rank 1 of 2 left 3.0 s ago (…)".
  std::string WhyIncomplete(const Channel& channel) const;
  std::vector<Missing> MissingOf(const Channel& channel, const Replica& replica) const;
  std::vector<Missing> MissingOf(const Channel& channel, const VersionState& version) const;
  /// For the error of a wait that ends, or that its caller gives up.
  std::string WhoHoldsUp(const Channel& channel, const Replica& replica) const;
  Status StillWaiting(const RankState& rank, const std::string& who) const;
  Status NotReleased(const Channel& channel, const VersionState& version, std::uint32_t rank) const;
  Status WaitsFor(const RankIdentity& identity, Version version) const;
  void OnExplainWait(Agent& agent, const proto::ExplainWait& message);

  // core_admin.cc, core_digests.cc: answers to tensorbusctl, proofs by digest.
  /// With "" the only one that is in use.
  Result<Channel*> FindChannel(const std::string& name);
  Channel* OnlyChannel();
  struct DigestJob;
  struct VerifyRun;
  struct ClaimRun;
  void AskDigests(std::shared_ptr<DigestJob> job);
  Result<std::vector<DigestHolder>> HoldersToVerify(const Channel& channel, Version version) const;
  std::vector<DigestHolder> ProducerHolders(const Channel& channel,
                                            const VersionState& version) const;
  std::string WhyNobodyHolds(const Channel& channel, Version version) const;
  bool StillHeld(const std::string& channel, const std::vector<DigestHolder>& holders) const;
  void AskHolders(const std::shared_ptr<VerifyRun>& run);
  void CompareHolders(const std::shared_ptr<VerifyRun>& run);
  void OnClaim(Agent& agent, const proto::ClaimVersion& message);
  void FindCandidates(ClaimRun& run) const;
  void NextCandidate(const std::shared_ptr<ClaimRun>& run);
  void AskCandidate(const std::shared_ptr<ClaimRun>& run);
  void JudgeCandidate(const std::shared_ptr<ClaimRun>& run);
  void EndClaim(const ClaimRun& run, const Status& status, Version version);

  const CoreOptions options_;
  Executor& executor_;
  SideWork& side_work_;
  DaemonMetrics& metrics_;
  const TimePoint started_;

  std::map<rpc::PortId, Port> ports_;
  std::map<std::string, Agent> agents_;
  std::map<std::string, Channel> channels_;
  ChannelEpoch forgotten_epoch_;     ///< the greatest of channels that were forgotten
  std::set<std::string> reconcile_;  ///< channels that changed in this task
  bool reconciling_ = false;
  bool silence_timer_ = false;

  std::map<RankKey, Registering> registering_;
  std::uint64_t next_work_ = 1;  ///< numbers registrations and assemblies

  std::map<SessionId, RunningSession> sessions_;
  std::deque<proto::SessionStatus> ended_;
  std::uint64_t next_session_;
  std::map<Hash128, Hash128> known_plans_;
  std::map<Hash128, std::weak_ptr<const LayoutEntry>> layouts_;

  std::map<std::uint64_t, PendingQuery> queries_;
  std::uint64_t next_query_ = 1;
  std::deque<proto::TraceEvent> trace_;
};

/// A timeout as messages carry it: 0 means `otherwise`; at most a day.
Nanos TimeoutOf(std::uint64_t timeout_ms, Nanos otherwise);

/// Wraps one body into a message: Wrap(&proto::DaemonMessage::mutable_go, go).
template <typename Body>
proto::DaemonMessage Wrap(Body* (proto::DaemonMessage::*mutable_body)(), Body body) {
  proto::DaemonMessage message;
  *(message.*mutable_body)() = std::move(body);
  return message;
}

}  // namespace tensorbus::daemon
