#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

std::uint64_t SessionOf(const proto::AgentMessage& message) {
  switch (message.body_case()) {
    case proto::AgentMessage::kSessionReady:
      return message.session_ready().session();
    case proto::AgentMessage::kSessionReceipt:
      return message.session_receipt().session();
    case proto::AgentMessage::kSourceDone:
      return message.source_done().session();
    case proto::AgentMessage::kFlipReady:
      return message.flip_ready().session();
    case proto::AgentMessage::kFlipDone:
      return message.flip_done().session();
    case proto::AgentMessage::kSessionFailed:
      return message.session_failed().session();
    default:
      return 0;
  }
}

bool Says(const proto::SessionFailed& report, std::uint32_t dirty_rank) {
  const auto& ranks = report.dirty_target_ranks();
  return std::find(ranks.begin(), ranks.end(), dirty_rank) != ranks.end();
}

}  // namespace

void Core::OnSessionMessage(Agent& agent, const proto::AgentMessage& message) {
  const SessionId id{SessionOf(message)};
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) {  // ended meanwhile; the agent has been told
    if (message.has_session_failed()) OnLeftBehind(agent, message.session_failed());
    return;
  }
  Session& session = found->second.session;
  if (session.Find(agent.name) == nullptr) {
    Log(LogLevel::kWarn, "session_stranger", {{"session", id.value}, {"agent", agent.name}});
    return;
  }
  if (message.has_session_failed()) {
    const proto::SessionFailed& failed = message.session_failed();
    Status why = rpc::FromProto(failed.error());
    if (why.ok()) why = Status(Code::kUnknown, "it gave no reason");
    return AbortSession(id, why.Annotate("agent " + agent.name), &agent, failed);
  }
  const Result<Session::Step> step = Feed(session, agent.name, message);
  if (!step.ok()) return AbortSession(id, step.status());
  TakeStep(found->second, *step);
}

Result<Session::Step> Core::Feed(Session& session, const std::string& agent,
                                 const proto::AgentMessage& message) {
  switch (message.body_case()) {
    case proto::AgentMessage::kSessionReady:
      return session.OnReady(agent, rpc::FromProto(message.session_ready().plan_digest()));
    case proto::AgentMessage::kSessionReceipt:
      return session.OnReceipt(agent, message.session_receipt());
    case proto::AgentMessage::kSourceDone:
      return session.OnSourceDone(agent, message.source_done());
    case proto::AgentMessage::kFlipReady:
      return session.OnFlipReady(agent, message.flip_ready().target_rank());
    case proto::AgentMessage::kFlipDone:
      return session.OnFlipDone(agent, message.flip_done().target_rank());
    default:
      return Session::Step::kNone;
  }
}

void Core::TakeStep(RunningSession& running, Session::Step step) {
  const Session& session = running.session;
  const std::uint64_t id = session.config().id.value;
  const auto tell = [&](auto mutable_body, auto body, bool sources, bool targets) {
    body.set_session(id);
    SendToParticipants(session, Wrap(mutable_body, std::move(body)), sources, targets);
  };
  switch (step) {
    case Session::Step::kNone:
      return;
    case Session::Step::kGo:
      EndPhase(running, "prepare", &metrics_.prepare_seconds);
      return tell(&proto::DaemonMessage::mutable_go, proto::Go(), false, false);
    case Session::Step::kFinish:
      EndPhase(running, "move", &metrics_.move_seconds);
      return tell(&proto::DaemonMessage::mutable_finish, proto::Finish(), true, false);
    case Session::Step::kFlipPrepare:
      EndPhase(running, "finish", nullptr);
      // Nobody reads the sources any more: their memory may be given back.
      ReconcileLater(session.config().channel);
      return tell(&proto::DaemonMessage::mutable_flip_prepare, proto::FlipPrepare(), false, true);
    case Session::Step::kFlipCommit:
      return tell(&proto::DaemonMessage::mutable_flip_commit, proto::FlipCommit(), false, true);
    case Session::Step::kEnd:
      EndPhase(running, "flip", &metrics_.flip_seconds);
      return FinishSession(session.config().id);
  }
}

void Core::EndPhase(RunningSession& running, const char* name, Histogram* seconds) {
  const TimePoint now = executor_.Now();
  if (seconds != nullptr) seconds->Observe(Seconds(now - running.phase_since));
  if (*name != 0) AddTrace(running.session, name, running.realtime_begin_ns);
  running.phase_since = now;
  running.realtime_begin_ns = RealtimeNs();
}

void Core::AddTrace(const Session& session, const char* name, std::uint64_t begin_ns) {
  const Session::Config& config = session.config();
  proto::TraceEvent event;
  event.set_name(name);
  event.set_track(
      fmt::format("{}/{}/{} session", config.channel, config.target_job, config.replica));
  event.set_session(config.id.value);
  event.set_begin_ns(begin_ns);
  event.set_end_ns(RealtimeNs());
  event.set_bytes(session.bytes());
  event.set_detail(fmt::format("version {}", config.version.value));
  trace_.push_back(std::move(event));
  if (trace_.size() > kMaxTraceEvents) trace_.pop_front();
}

void Core::SendToParticipants(const Session& session, const proto::DaemonMessage& message,
                              bool sources_only, bool targets_only) {
  for (const Session::Participant& participant : session.config().participants) {
    if (sources_only && participant.source_ranks.empty()) continue;
    if (targets_only && participant.target_ranks.empty()) continue;
    SendTo(participant.agent, message);
  }
}

Hash128 Core::PlanKey(const Session::Config& config) const {
  Hasher hasher;
  for (const Hash128& hash : {config.source->hash, config.target->hash}) {
    hasher.AddU64(hash.low);
    hasher.AddU64(hash.high);
  }
  for (const Session::Participant& participant : config.participants) {
    hasher.AddString(participant.agent);
    hasher.AddString(participant.host);
    hasher.AddU64(participant.source_ranks.size());
    for (const std::uint32_t rank : participant.source_ranks) hasher.AddU32(rank);
    hasher.AddU64(participant.target_ranks.size());
    for (const std::uint32_t rank : participant.target_ranks) hasher.AddU32(rank);
  }
  return hasher.Finish();
}

void Core::FinishSession(SessionId id) {
  const RunningSession& running = sessions_.at(id);
  const Session& session = running.session;
  const Session::Config& config = session.config();
  const double seconds = Seconds(executor_.Now() - config.started);
  Channel& channel = channels_.at(config.channel);
  Replica& replica = channel.replicas.at({config.target_job, config.replica});
  for (auto& [number, rank] : replica.ranks) {
    rank.live = config.version;
    rank.dirty = false;
    rank.doubt = {};
    rank.request.reset();
  }
  const auto version = channel.versions.find(config.version);
  if (version != channel.versions.end()) {
    version->second.taken.insert({config.target_job, config.replica});
  }
  if (session.plan_digest()) {
    if (known_plans_.size() >= kMaxKnownPlans) known_plans_.clear();
    known_plans_[PlanKey(config)] = *session.plan_digest();
  }
  proto::SessionEnded ended;
  ended.set_session(id.value);
  ended.set_version(config.version.value);
  ended.set_seconds(seconds);
  SendToParticipants(session, Wrap(&proto::DaemonMessage::mutable_session_ended, std::move(ended)),
                     false, false);
  metrics_.sessions_done.Increment();
  metrics_.session_bytes.Add(static_cast<double>(session.bytes()));
  metrics_.session_seconds.Observe(seconds);
  Log(LogLevel::kInfo, "session_done",
      {{"session", id.value},
       {"replica", ReplicaName(channel, replica)},
       {"version", config.version.value},
       {"bytes", session.bytes()},
       {"dur_ms", fmt::format("{:.2f}", seconds * 1e3)}});
  CloseSession(id, {});
}

// With the report of the agent at which it failed, if it failed at one: of its own ranks that agent
// knows what the session left behind. Of the others it is not known yet whether a byte was written,
// and unknown is dirty: their agents answer the Abort, see OnLeftBehind().
void Core::AbortSession(SessionId id, Status why, const Agent* agent,
                        const proto::SessionFailed& report) {
  RunningSession& running = sessions_.at(id);
  Session& session = running.session;
  const Session::Config& config = session.config();
  Channel& channel = channels_.at(config.channel);
  Replica& replica = channel.replicas.at({config.target_job, config.replica});
  // Once ranks began to flip, some serve the new version and others the old one.
  const bool mixture = session.state() == Session::State::kCommitting;
  const bool in_doubt = config.flip == FlipMode::kInPlace && session.started();
  for (auto& [number, rank] : replica.ranks) {
    const bool own = agent != nullptr && rank.agent == agent->name;
    if (mixture || (own && Says(report, number))) {
      rank.dirty = true;
      rank.doubt = {};
    } else if (in_doubt && !own) {
      // What one session left behind says nothing of the next: only a repair ends two doubts.
      rank.doubt = rank.dirty ? SessionId{} : id;
      rank.dirty = true;
    }
  }
  if (why.reason() == Reason::kPlanMismatch) known_plans_.erase(PlanKey(config));
  why = why.Annotate(fmt::format("session {} of version {} to {}", id.value, config.version.value,
                                 ReplicaName(channel, replica)));
  Log(LogLevel::kWarn, "session_failed",
      {{"session", id.value}, {"state", StateName(session.state())}, {"error", why}});
  proto::Abort abort;
  abort.set_session(id.value);
  *abort.mutable_error() = rpc::ToProto(why);
  SendToParticipants(session, Wrap(&proto::DaemonMessage::mutable_abort, std::move(abort)), false,
                     false);
  EndRequests(replica, why, {});
  EndPhase(running, StateName(session.state()).data(), nullptr);
  session.MarkFailed();
  metrics_.sessions_failed.Increment();
  CloseSession(id, why);
}

// An agent's answer to the Abort of a session: its copies have stopped.
void Core::OnLeftBehind(const Agent& agent, const proto::SessionFailed& report) {
  for (const RankKey& key : agent.ranks) {
    RankState* const rank = FindRank(key);
    if (rank == nullptr || rank->doubt.value == 0) continue;
    if (rank->doubt.value != report.session()) continue;
    rank->doubt = {};
    rank->dirty = Says(report, key.rank);
    ReconcileLater(key.channel);
  }
}

void Core::SessionTimedOut(SessionId id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const Session& session = found->second.session;
  AbortSession(id,
               Status(Code::kDeadlineExceeded,
                      fmt::format("gave up after {:.1f} s ({}): {}",
                                  Seconds(executor_.Now() - session.config().started),
                                  StateName(session.state()), fmt::join(session.Missing(), "; ")),
                      Reason::kMissingRank));
}

void Core::CloseSession(SessionId id, const Status& status) {
  auto node = sessions_.extract(id);
  RunningSession& running = node.mapped();
  executor_.CancelTimer(running.timer);
  const Session::Config& config = running.session.config();
  Channel& channel = channels_.at(config.channel);
  channel.replicas.at({config.target_job, config.replica}).session = {};
  proto::SessionStatus record;
  record.set_session(id.value);
  record.set_channel(config.channel);
  record.set_target_job(config.target_job);
  record.set_replica(config.replica);
  record.set_version(config.version.value);
  record.set_state(std::string(StateName(running.session.state())));
  record.set_seconds(Seconds(executor_.Now() - config.started));
  record.set_bytes(running.session.bytes());
  if (!status.ok()) *record.mutable_error() = rpc::ToProto(status);
  ended_.push_back(std::move(record));
  if (ended_.size() > kMaxEndedSessions) ended_.pop_front();
  ReconcileLater(channel.name);
  UpdateGauges();
}

void Core::AbortSessionsOf(const RankKey& key, const Status& why) {
  std::vector<SessionId> hit;
  for (const auto& [id, running] : sessions_) {
    const Session::Config& config = running.session.config();
    if (config.channel != key.channel) continue;
    // Sources that have finished are not needed any more.
    const bool source =
        key.role == Role::kProducer && running.session.state() < Session::State::kFlipping;
    const bool target = key.role == Role::kConsumer && config.target_job == key.job &&
                        config.replica == key.replica;
    if (source || target) hit.push_back(id);
  }
  for (const SessionId id : hit) AbortSession(id, why);
}

}  // namespace tensorbus::daemon
