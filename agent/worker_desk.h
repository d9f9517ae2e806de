#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/channel_epochs.h"
#include "agent/private_memory.h"
#include "agent/rank.h"
#include "agent/registration.h"
#include "agent/work_pool.h"
#include "agent/worker_server.h"
#include "proto/tensorbus.pb.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/base/status.h"
#include "worker_shim/wire.h"

namespace tensorbus::agent {

/// What the desk needs of the agent around it. Confined to the executor.
class DeskHost {
 public:
  virtual ~DeskHost() = default;

  /// Whether the daemon has welcomed this agent and hears it now.
  virtual bool daemon_ready() const = 0;
  /// Why there is no daemon while it is not ready, and what helps.
  virtual Status no_daemon() const = 0;
  virtual void SendToDaemon(proto::AgentMessage message) = 0;
  /// What is known of channels across daemons.
  virtual ChannelEpochs& epochs() = 0;
  /// To a worker. From any thread; a connection that is gone swallows it.
  virtual void SendToWorker(ConnectionId connection, wire::MessageType type, std::uint64_t request,
                            std::vector<std::byte> body, std::vector<UniqueFd> fds = {}) = 0;
  virtual void CloseWorker(ConnectionId connection, std::string why) = 0;
  /// A registered rank is gone or is about to register anew; sessions must not go on with it.
  virtual void OnRankLeft(const Rank& rank, const std::string& why) = 0;
};

/// Serves worker processes: who they are, what they registered, what they ask, which hooks they
/// owe.
///
/// Every request of a worker is answered exactly once: by the daemon's decision, by a failure, or
/// by its own deadline. A worker that dies or misbehaves costs its own connection only.
///
/// Threads: confined to the executor.
class WorkerDesk {
 public:
  struct Options {
    std::string agent_name;
    std::uint64_t staging_bytes = 0;
    /// What ranks with private memory share.
    PrivateMemoryPlant private_memory = {};
    /// How long a registration or publish waits for a daemon that is not there.
    Nanos daemon_wait = std::chrono::seconds(10);
    /// How long a registration waits for a daemon that is there: it may have a large layout to look
    /// at, and receipts may have to be made first. Longer than the daemon gives itself.
    Nanos register_wait = std::chrono::minutes(12);
    /// How long a publish waits for a daemon that is there. It answers at once unless it is stuck.
    Nanos publish_wait = std::chrono::minutes(1);
    /// How long a claim may take. Longer than the daemon gives itself.
    Nanos claim_wait = std::chrono::minutes(12);
    /// Added to a worker's own deadline before this side answers in the daemon's place.
    Nanos deadline_grace = std::chrono::milliseconds(500);
  };

  WorkerDesk(Options options, Executor& executor, WorkPool& pool, DeskHost& host);
  ~WorkerDesk();
  WorkerDesk(const WorkerDesk&) = delete;
  WorkerDesk& operator=(const WorkerDesk&) = delete;

  // From the worker server.
  void OnOpen(ConnectionId connection, PeerProcess peer);
  void OnFrame(ConnectionId connection, wire::Frame frame);
  void OnClosed(ConnectionId connection, const std::string& why);

  // From the daemon.
  void OnDaemonReady();
  void OnDaemonLost(const Status& why);
  void OnRankRegistered(const proto::RankRegistered& message);
  void OnPublishAccepted(const proto::PublishAccepted& message);
  void OnVersionReleased(const RankKey& key, Version version, const Status& status);
  void OnDropSnapshot(const RankKey& key, Version version);
  /// With an OK `status` the rank has what it asked for already, `live`.
  void OnRequestFailed(std::uint64_t request, const RankKey& key, const Status& status,
                       Version live);
  void OnClaimAnswered(const proto::ClaimAnswered& message);
  void OnWaitExplained(std::uint64_t worker_request, const RankKey& key, const Status& why);

  /// Whoever waits for a worker to pack or unpack stops waiting: for an agent that stops.
  void CloseBuckets(const Status& why);

  /// A rank whose memory is checked, or null.
  std::shared_ptr<Rank> FindRank(const RankKey& key) const;
  void CallHook(const std::shared_ptr<Rank>& rank, wire::MessageType hook, wire::HookEvent event,
                Nanos timeout, std::function<void(Status)> done);
  /// The session that wrote to the rank is over without a flip.
  void OnTargetFree(Rank& rank);
  /// Answers the pending update of the rank; without one there is nobody to tell.
  void TellUpdated(Rank& rank, const wire::Updated& updated);

  std::size_t rank_count() const { return by_key_.size(); }

 private:
  /// A request of one kind that waits for the daemon.
  struct PendingUpdate {
    std::uint64_t worker_request = 0;
    std::uint64_t daemon_request = 0;
    wire::Update update;
    TimePoint deadline;
    Executor::TimerId timer = 0;
    /// How it failed, while a session that writes to this rank has not ended: only then is it known
    /// what the memory holds.
    std::optional<Status> failure;
  };
  struct PendingPublish {
    std::uint64_t worker_request = 0;
    std::uint64_t daemon_request = 0;  ///< 0 while receipts or the snapshot are being made
    wire::Publish publish;
    std::uint64_t write_count = 0;
    std::shared_ptr<const MemoryAccess> snapshot;
    PublishReceipts receipts;
    bool sent = false;   ///< the daemon may have accepted it
    TimePoint deadline;  ///< for a daemon that is not there
    TimePoint limit;     ///< for one that is
  };
  struct PendingRelease {
    std::uint64_t worker_request = 0;
    TimePoint deadline;
    Executor::TimerId timer = 0;
  };
  struct PendingClaim {
    std::uint64_t worker_request = 0;
    std::uint64_t daemon_request = 0;
    Executor::TimerId timer = 0;
  };
  struct PendingHook {
    std::shared_ptr<Rank> rank;
    wire::MessageType hook = wire::MessageType::kPing;
    std::function<void(Status)> done;
    Executor::TimerId timer = 0;
  };
  /// One connected worker: its rank and what it waits for.
  struct Worker {
    ConnectionId connection;
    PeerProcess peer;
    std::shared_ptr<Rank> rank;          ///< null before kHello
    bool closing = false;                ///< told to go; nothing it still says counts
    std::uint64_t register_request = 0;  ///< of the worker; 0 when answered
    std::uint64_t daemon_register_request = 0;
    TimePoint register_deadline;  ///< for a daemon that is not there
    TimePoint register_limit;     ///< for one that is
    double register_seconds = 0;
    double prefault_seconds = 0;
    std::optional<PendingUpdate> update;
    std::optional<PendingPublish> publish;
    std::map<Version, PendingRelease> releases;
    std::optional<PendingClaim> claim;
    /// Requests of which the daemon is being asked what they wait for: each once at a time, however
    /// often the worker asks.
    std::set<std::uint64_t> explaining;

    /// Whether a request other than a registration is to be answered.
    bool waits() const {
      return update.has_value() || publish.has_value() || claim.has_value() || !releases.empty();
    }
  };

  // worker_desk.cc
  void OnHello(Worker& worker, wire::Frame frame, int attempt);
  Status AcceptHello(Worker& worker, const wire::Hello& hello, const wire::Frame& frame);
  void OnBucketDone(Worker& worker, const wire::Frame& frame);
  void Leave(Worker& worker, bool on_purpose, const std::string& why);
  // worker_registering.cc
  void OnAttach(Worker& worker, wire::Frame frame);
  void OnRegister(Worker& worker, wire::Frame frame);
  void CheckOnPool(const Worker& worker, wire::Register asked);
  void RegistrationChecked(ConnectionId connection, Result<CheckedRegistration> checked);
  void MakeReceiptsAgain(Worker& worker, CheckedRegistration checked);
  void JoinDaemon(Worker& worker, CheckedRegistration checked);
  void RegisterAtDaemon(Worker& worker);
  void AwaitRegistered(Worker& worker);
  void GiveUpRegistering(Worker& worker);
  /// `returns`: it is registered again right after.
  void LeaveAtDaemon(const Rank& rank, bool on_purpose, const std::string& why,
                     bool returns = false);
  void RegisterAnew(Worker& worker, const std::string& why);
  struct JoinedChannel {
    ChannelEpoch epoch;
    Version latest_version;
  };
  void AnswerRegistered(Worker& worker, const Status& status, const JoinedChannel& joined);
  // worker_publish.cc
  void OnPublish(Worker& worker, wire::Frame frame);
  void MakeSnapshot(Worker& worker);
  void MakeReceipts(Worker& worker, std::shared_ptr<const MemoryAccess> memory);
  void MakeRouteReceipts(ConnectionId connection, std::shared_ptr<const MemoryAccess> memory,
                         std::vector<PlanKey> keys);
  void PublishAtDaemon(Worker& worker);
  void AwaitAccepted(Worker& worker);
  void GiveUpPublishing(Worker& worker);
  void AnswerPublish(Worker& worker, const Status& status);
  void OnRequestRelease(Worker& worker, wire::Frame frame);
  void AskRelease(Worker& worker, Version version, const PendingRelease& pending);
  void AnswerRelease(Worker& worker, Version version, const Status& status);
  void Released(Worker& worker, Version version);
  // worker_requests.cc
  void OnUpdate(Worker& worker, wire::Frame frame);
  void AskUpdate(Worker& worker);
  void AnswerUpdate(Worker& worker, wire::Updated updated);
  void FailUpdate(Worker& worker, const Status& why);
  void OnCancelUpdate(Worker& worker, const wire::Frame& frame);
  void OnHookDone(Worker& worker, const wire::Frame& frame);
  void OnClaim(Worker& worker, const wire::Frame& frame);
  void AnswerClaim(Worker& worker, const Status& status, Version version);

  // worker_explain.cc
  void OnExplain(Worker& worker, const wire::Frame& frame);
  bool AsksDaemon(const Worker& worker, std::uint64_t request) const;
  Status NotAtDaemon(const Worker& worker) const;
  Status OwnWork(const Worker& worker, std::uint64_t request) const;
  void Explained(const Worker& worker, std::uint64_t request, const Status& why);

  Worker* Find(ConnectionId connection);
  Worker* Find(const RankKey& key);
  Status CheckRegistered(const Worker& worker) const;
  /// Tells the worker why and closes its connection.
  void BreakOff(Worker& worker, const Status& why);
  void FailHooks(const Rank& rank, const Status& why);

  template <typename Message>
  void Send(const Worker& worker, wire::MessageType type, std::uint64_t request,
            const Message& message) {
    host_.SendToWorker(worker.connection, type, request, wire::Encode(message));
  }
  void Reply(const Worker& worker, std::uint64_t request, const Status& status);
  /// Decodes the frame, or breaks the connection off and gives none.
  template <typename Message>
  std::optional<Message> Parse(Worker& worker, const wire::Frame& frame);
  /// Runs `task` with the worker if it is still there.
  std::function<void()> IfThere(ConnectionId connection, std::function<void(Worker&)> task);

  const Options options_;
  Executor& executor_;
  WorkPool& pool_;
  DeskHost& host_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Worker>> workers_;  ///< by connection
  std::map<RankKey, ConnectionId> by_key_;
  std::unordered_map<std::uint64_t, PendingHook> hooks_;
  std::uint64_t next_request_ = 1;
  std::uint64_t next_channel_ = 1;  ///< counts bucket channels
  /// Tasks posted for later look at it: the desk may be gone by then.
  std::shared_ptr<bool> alive_;
};

}  // namespace tensorbus::agent
