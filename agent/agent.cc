#include "agent/agent.h"

#include <fmt/format.h>
#include <future>
#include <unistd.h>

#include "agent/session_table.h"
#include "agent/tensor_digests.h"
#include "agent/trace_dump.h"
#include "tensorbus/base/log.h"
#include "tensorbus/base/stop_guard.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/protocol.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::agent {
namespace {

/// For everything that is waited for when an agent stops; copies under way end long before.
constexpr Nanos kStopLimit = std::chrono::seconds(30);

AgentParts WithBudget(AgentParts parts, const AgentOptions& options) {
  if (parts.staging == nullptr) {
    parts.staging = transport::StagingBudget::Create(options.staging_bytes);
  }
  return parts;
}

Result<RankKey> KeyOf(const proto::Rank& rank) {
  TB_ASSIGN_OR_RETURN(const RankIdentity identity, rpc::FromProto(rank));
  return RankKey::Of(identity);
}

}  // namespace

/// The agent's inside, confined to its executor: joins desk, sessions and daemon link.
class Agent::Core final : public SessionHost, public DeskHost {
 public:
  Core(AgentOptions options, AgentParts parts, Executor& executor)
      : options_(std::move(options)),
        parts_(WithBudget(std::move(parts), options_)),
        executor_(executor),
        pool_("tb-work", std::max<std::uint32_t>(1, options_.work_thread_count)),
        trace_(options_.trace_record_count),
        sessions_(*this),
        desk_({.agent_name = options_.name,
               .staging_bytes = parts_.staging->limit_bytes(),
               .private_memory = {.budget = parts_.staging,
                                  .stages = StagePool::Create(parts_.staging,
                                                              options_.work_thread_count * 2),
                                  .bucket_patience = options_.bucket_patience},
               .daemon_wait = options_.daemon_wait,
               .register_wait = options_.register_wait,
               .publish_wait = options_.publish_wait,
               .claim_wait = options_.claim_wait},
              executor_, pool_, *this),
        link_(LinkOptions(), executor_, parts_.open_link, LinkHandler()) {
    if (parts_.metrics != nullptr) AddMetrics(*parts_.metrics);
  }

  Status Listen() {
    TB_ASSIGN_OR_RETURN(
        server_,
        WorkerServer::Create(
            options_.workers, executor_,
            {.on_open = [this](ConnectionId id, PeerProcess peer) { desk_.OnOpen(id, peer); },
             .on_frame =
                 [this](ConnectionId id, wire::Frame frame) {
                   desk_.OnFrame(id, std::move(frame));
                   ShowCounts();
                 },
             .on_closed =
                 [this](ConnectionId id, const std::string& why) {
                   desk_.OnClosed(id, why);
                   ShowCounts();
                 }}));
    return {};
  }
  void Start() { link_.Start(); }
  const std::string& socket_path() const { return server_->path(); }

  /// From outside the executor; nothing is posted to it by workers after this.
  void StopWorkers() {
    if (server_ != nullptr) server_->Stop();
  }
  /// On the executor: no session reads or writes any memory after this.
  void StopSessions() {
    desk_.CloseBuckets(Status(Code::kCancelled, "the agent stops", Reason::kCancelled));
    sessions_.Shutdown();
  }
  /// From outside the executor, before it stops.
  void StopWork() {
    pulls_.Wait();
    pool_.Stop();
  }

  // SessionHost
  Executor& executor() override { return executor_; }
  WorkPool& pool() override { return pool_; }
  LayoutCache& layouts() override { return layouts_; }
  PlanCache& plans() override { return plans_; }
  ChannelEpochs& epochs() override { return epochs_; }
  TraceRing& trace() override { return trace_; }
  Outstanding& pulls() override { return pulls_; }
  const std::string& agent_name() const override { return options_.name; }
  transport::Transport& local() override { return *parts_.local; }
  transport::Transport* remote() override { return parts_.remote; }
  std::shared_ptr<Rank> FindRank(const RankKey& key) override { return desk_.FindRank(key); }
  void Send(proto::AgentMessage message) override { link_.Send(std::move(message)); }
  void GetLayout(const Hash128& hash, Nanos timeout, rpc::ControlLink::OnLayout done) override {
    link_.GetLayout(hash, timeout, std::move(done));
  }
  void CallHook(const std::shared_ptr<Rank>& rank, wire::MessageType hook, wire::HookEvent event,
                Nanos timeout, std::function<void(Status)> done) override {
    desk_.CallHook(rank, hook, event, timeout, std::move(done));
  }
  void OnTargetFree(Rank& rank) override { desk_.OnTargetFree(rank); }
  void TellUpdated(Rank& rank, wire::Updated updated) override { desk_.TellUpdated(rank, updated); }
  std::string DumpTrace(SessionId session, const Status& why) override {
    if (options_.trace_folder.empty()) return "";
    std::string path = TracePath(options_.trace_folder, session);
    pool_.Submit([path, session, why, records = trace_.Records()] {
      const Status written = WriteTrace(path, session, why, records);
      if (!written.ok()) Log(LogLevel::kWarn, "trace_not_written", {{"error", written}});
    });
    return path;
  }
  void CountBytesMoved(std::uint64_t bytes) override {
    if (bytes_counter_ != nullptr) bytes_counter_->Add(static_cast<double>(bytes));
  }

  // DeskHost
  bool daemon_ready() const override { return link_.ready(); }
  Status no_daemon() const override {
    if (!link_.refused().ok()) {
      return link_.refused().Annotate(
          fmt::format("the daemon at {} refuses this agent", options_.daemon_target));
    }
    return {
        Code::kUnavailable,
        fmt::format("no daemon answers at {}; start tensorbusd or give the agent another --daemon",
                    options_.daemon_target),
        Reason::kNotRunning};
  }
  void SendToDaemon(proto::AgentMessage message) override { link_.Send(std::move(message)); }
  void SendToWorker(ConnectionId connection, wire::MessageType type, std::uint64_t request,
                    std::vector<std::byte> body, std::vector<UniqueFd> fds) override {
    server_->Send(connection, type, request, std::move(body), std::move(fds));
  }
  void CloseWorker(ConnectionId connection, std::string why) override {
    server_->Close(connection, std::move(why));
  }
  void OnRankLeft(const Rank& rank, const std::string& why) override {
    sessions_.OnRankLeft(rank, why);
  }

 private:
  DaemonLink::Options LinkOptions() const {
    DaemonLink::Options options;
    options.hello.set_protocol(rpc::kControlProtocol);
    options.hello.set_agent(options_.name);
    options.hello.set_host(options_.host);
    if (parts_.remote != nullptr && !parts_.remote->endpoint().empty()) {
      options.hello.add_endpoints(parts_.remote->endpoint());
    }
    options.hello.set_pid(static_cast<std::uint32_t>(::getpid()));
    options.retry_min = options_.daemon_retry_min;
    options.retry_max = options_.daemon_retry_max;
    return options;
  }

  DaemonLink::Handler LinkHandler() {
    return {.on_ready =
                [this](const proto::Welcome& welcome) {
                  if (parts_.on_data_token) parts_.on_data_token(welcome.data_token());
                  desk_.OnDaemonReady();
                },
            .on_message = [this](const proto::DaemonMessage& message) { OnMessage(message); },
            .on_lost =
                [this](const Status& why) {
                  const Status lost(Code::kUnavailable,
                                    fmt::format("the daemon at {} is gone: {}",
                                                options_.daemon_target, why.message()),
                                    Reason::kNotRunning);
                  sessions_.OnDaemonLost(lost);
                  desk_.OnDaemonLost(lost);
                }};
  }

  void OnMessage(const proto::DaemonMessage& message);
  void OnQuery(const proto::Query& query);
  void AddMetrics(Metrics& metrics);
  void ShowCounts() {
    if (ranks_gauge_ != nullptr) ranks_gauge_->Set(static_cast<double>(desk_.rank_count()));
  }

  const AgentOptions options_;
  const AgentParts parts_;
  Executor& executor_;
  Outstanding pulls_;
  WorkPool pool_;
  LayoutCache layouts_{16};
  PlanCache plans_{8};
  ChannelEpochs epochs_;
  TraceRing trace_;
  SessionTable sessions_;
  WorkerDesk desk_;
  DaemonLink link_;
  std::unique_ptr<WorkerServer> server_;
  Gauge* ranks_gauge_ = nullptr;
  Counter* bytes_counter_ = nullptr;
};

void Agent::Core::OnMessage(const proto::DaemonMessage& message) {
  using Body = proto::DaemonMessage;
  switch (message.body_case()) {
    case Body::kRankRegistered:
      return desk_.OnRankRegistered(message.rank_registered());
    case Body::kPublishAccepted:
      return desk_.OnPublishAccepted(message.publish_accepted());
    case Body::kVersionReleased: {
      const proto::VersionReleased& in = message.version_released();
      const Result<RankKey> key = KeyOf(in.rank());
      if (!key.ok()) break;
      return desk_.OnVersionReleased(*key, Version{in.version()}, rpc::FromProto(in.error()));
    }
    case Body::kDropSnapshot: {
      const Result<RankKey> key = KeyOf(message.drop_snapshot().rank());
      if (!key.ok()) break;
      return desk_.OnDropSnapshot(*key, Version{message.drop_snapshot().version()});
    }
    case Body::kRequestFailed: {
      const proto::RequestFailed& in = message.request_failed();
      const Result<RankKey> key = KeyOf(in.rank());
      if (!key.ok()) break;
      return desk_.OnRequestFailed(in.request(), *key, rpc::FromProto(in.error()),
                                   Version{in.live_version()});
    }
    case Body::kWaitExplained: {
      const proto::WaitExplained& in = message.wait_explained();
      const Result<RankKey> key = KeyOf(in.rank());
      if (!key.ok()) break;
      return desk_.OnWaitExplained(in.request(), *key, rpc::FromProto(in.error()));
    }
    case Body::kClaimAnswered:
      return desk_.OnClaimAnswered(message.claim_answered());
    case Body::kPrepare:
      return sessions_.OnPrepare(message.prepare());
    case Body::kGo:
      return sessions_.OnGo(SessionId{message.go().session()});
    case Body::kFinish:
      return sessions_.OnFinish(SessionId{message.finish().session()});
    case Body::kFlipPrepare:
      return sessions_.OnFlipPrepare(SessionId{message.flip_prepare().session()});
    case Body::kFlipCommit:
      return sessions_.OnFlipCommit(SessionId{message.flip_commit().session()});
    case Body::kAbort:
      return sessions_.OnAbort(SessionId{message.abort().session()},
                               rpc::FromProto(message.abort().error()));
    case Body::kSessionEnded:
      return sessions_.OnEnded(SessionId{message.session_ended().session()},
                               message.session_ended().seconds());
    case Body::kQuery:
      return OnQuery(message.query());
    case Body::kWelcome:
    case Body::BODY_NOT_SET:
      break;
  }
  Log(LogLevel::kWarn, "daemon_message_ignored", {{"body", static_cast<int>(message.body_case())}});
}

void Agent::Core::OnQuery(const proto::Query& query) {
  proto::AgentMessage message;
  proto::Answer& answer = *message.mutable_answer();
  answer.set_query(query.query());
  if (query.has_digest()) {
    const Result<RankKey> key = KeyOf(query.digest().rank());
    const std::shared_ptr<Rank> rank = key.ok() ? desk_.FindRank(*key) : nullptr;
    if (rank != nullptr) {
      return AnswerDigestQuery({pool_, executor_}, *rank, query.digest(),
                               [this, id = query.query()](const Result<TensorDigestList>& digests) {
                                 proto::AgentMessage later;
                                 later.mutable_answer()->set_query(id);
                                 if (digests.ok()) {
                                   *later.mutable_answer()->mutable_digests() = *digests;
                                 } else {
                                   *later.mutable_answer()->mutable_error() =
                                       rpc::ToProto(digests.status());
                                 }
                                 link_.Send(std::move(later));
                               });
    }
    *answer.mutable_error() = rpc::ToProto(
        key.ok() ? Status(Code::kNotFound, "no such rank at this agent", Reason::kPeerLost)
                 : key.status());
  } else if (query.has_trace()) {
    for (const TraceRecord& record : trace_.Records()) {
      proto::TraceEvent& event = *answer.add_events();
      event.set_name(record.name);
      event.set_track(record.track);
      event.set_session(record.session.value);
      event.set_begin_ns(record.begin_ns);
      event.set_end_ns(record.end_ns);
      event.set_bytes(record.bytes);
    }
  } else {
    *answer.mutable_error() = rpc::ToProto(Status(
        Code::kUnimplemented, "this agent does not know the question", Reason::kUnsupported));
  }
  link_.Send(std::move(message));
}

void Agent::Core::AddMetrics(Metrics& metrics) {
  ranks_gauge_ = &metrics.AddGauge("tensorbus_agent_ranks_count", "Worker ranks connected now.");
  bytes_counter_ = &metrics.AddCounter("tensorbus_agent_moved_bytes_total",
                                       "Bytes that arrived at this agent's ranks.");
  metrics.AddGauge(
      "tensorbus_agent_staging_bytes", "Memory held for bytes on their way.",
      [staging = parts_.staging] { return static_cast<double>(staging->used_bytes()); });
  metrics.AddGauge(
      "tensorbus_agent_staging_peak_bytes", "Most memory ever held for bytes on their way.",
      [staging = parts_.staging] { return static_cast<double>(staging->used_bytes_max()); });
}

Agent::Agent() = default;

Result<std::unique_ptr<Agent>> Agent::Create(AgentOptions options, AgentParts parts) {
  if (!options.trace_folder.empty()) {
    TB_RETURN_IF_ERROR(rpc::EnsurePrivateDir(options.trace_folder).Annotate("traces"));
  }
  std::unique_ptr<Agent> agent(new Agent());
  agent->executor_ = std::make_unique<ThreadExecutor>("tb-agent");
  agent->core_ = std::make_unique<Core>(std::move(options), std::move(parts), *agent->executor_);
  // On the executor: the first worker may be there before Listen() has returned.
  std::promise<Status> listening;
  agent->executor_->Post([core = agent->core_.get(), &listening] {
    Status listens = core->Listen();
    if (listens.ok()) core->Start();
    listening.set_value(std::move(listens));
  });
  StopGuard guard("agent", kStopLimit);  // the task refers to what this function would leave
  guard.At("listening for workers");
  TB_RETURN_IF_ERROR(listening.get_future().get());
  return agent;
}

Agent::~Agent() {
  Stop();
}

const std::string& Agent::socket_path() const {
  return core_->socket_path();
}

// Workers first (they hear why, and see the end of their stream), then sessions, then the threads
// that may still work for them, then the executor that all of these post to.
void Agent::Stop() {
  if (core_ == nullptr) return;
  StopGuard guard("agent", kStopLimit);
  guard.At("the workers' connections");
  core_->StopWorkers();
  guard.At("sessions, and whoever reads their sources");
  std::promise<void> stopped;
  executor_->Post([this, &stopped] {
    core_->StopSessions();
    stopped.set_value();
  });
  stopped.get_future().wait();
  guard.At("pulls and copies under way");
  core_->StopWork();
  guard.At("the agent's executor");
  executor_->Stop();
  core_.reset();
}

}  // namespace tensorbus::agent
