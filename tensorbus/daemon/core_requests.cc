#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/secret.h"
#include "tensorbus/daemon/version_policy.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

/// Requests of one replica whose deadlines lie this close together count as one.
constexpr Nanos kSameMoment = std::chrono::milliseconds(100);

}  // namespace

void Core::ReconcileLater(const std::string& channel) {
  reconcile_.insert(channel);
  if (std::exchange(reconciling_, true)) return;
  executor_.Post([this] {
    reconciling_ = false;
    const std::set<std::string> changed = std::exchange(reconcile_, {});
    for (const std::string& name : changed) {
      if (const auto found = channels_.find(name); found != channels_.end()) {
        Reconcile(found->second);
      }
    }
  });
}

void Core::Reconcile(Channel& channel) {
  // Sessions first: who waits already gets a version before its memory is given back.
  for (auto& [key, replica] : channel.replicas) TryOpen(channel, replica);
  std::vector<Version> gone;
  for (auto& [number, version] : channel.versions) TryRelease(channel, version, gone);
  for (const Version number : gone) Retire(channel, number);
  DropSnapshots(channel);
}

void Core::OnRequestVersion(Agent& agent, const proto::RequestVersion& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  const Status status =
      identity.ok() ? AcceptRequest(agent, *identity, message) : identity.status();
  if (status.ok()) return ReconcileLater(identity->channel);
  metrics_.requests_failed.Increment();
  proto::RequestFailed reply;
  reply.set_request(message.request());
  *reply.mutable_rank() = message.rank();
  *reply.mutable_error() = rpc::ToProto(status);
  SendTo(agent.name, Wrap(&proto::DaemonMessage::mutable_request_failed, std::move(reply)));
}

Status Core::AcceptRequest(Agent& agent, const RankIdentity& identity,
                           const proto::RequestVersion& message) {
  RankState* rank = FindOwn(agent, identity);
  if (rank == nullptr || identity.role != Role::kConsumer) {
    return {Code::kFailedPrecondition,
            identity.ToString() + " is not registered as a consumer; register it first"};
  }
  if (message.selector() < 1 || message.selector() > 3 ||
      (message.selector() == static_cast<std::uint32_t>(Selector::kPinned) &&
       message.version() == 0)) {
    return {Code::kInvalidArgument,
            identity.ToString() + " asks for an unknown kind of version, or for version 0",
            Reason::kMalformed};
  }
  if (rank->request) {
    return {
        Code::kFailedPrecondition,
        identity.ToString() + " has asked for a version already; wait for that one or cancel it",
        Reason::kBusy};
  }
  Channel& channel = channels_.at(identity.channel);
  const Replica& replica = channel.replicas.at({identity.job, identity.replica});
  TB_RETURN_IF_ERROR(replica.fault);
  Request request;
  request.id = message.request();
  request.selector = static_cast<Selector>(message.selector());
  request.version = Version{message.version()};
  request.since = executor_.Now();
  request.deadline = request.since + TimeoutOf(message.timeout_ms(), options_.default_timeout);
  request.timer = executor_.PostAt(
      request.deadline,
      [this, key = KeyOf(identity), id = request.id] { RequestTimedOut(key, id); });
  rank->request = request;
  return {};
}

void Core::OnCancelRequest(Agent& agent, const proto::CancelRequest& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  if (!identity.ok() || identity->role != Role::kConsumer) return;
  RankState* rank = FindOwn(agent, *identity);
  if (rank == nullptr || !rank->request) return;
  const Replica& replica =
      channels_.at(identity->channel).replicas.at({identity->job, identity->replica});
  const Status status(Code::kCancelled, identity->ToString() + " took its request back",
                      Reason::kCancelled);
  if (replica.session.value != 0) {
    AbortSession(replica.session, status);
  } else {
    EndRequest(*rank, status, {});
  }
}

void Core::RequestTimedOut(const RankKey& key, std::uint64_t request) {
  const RankState* expired = FindRank(key);
  if (expired == nullptr || !expired->request || expired->request->id != request) return;
  const Channel& channel = channels_.at(key.channel);
  Replica& replica = channels_.at(key.channel).replicas.at({key.job, key.replica});
  const std::string who = WhoHoldsUp(channel, replica);
  // Ranks that asked together end together, with the same reason: were they ended one by one, each
  // would be told that the ones before it no longer ask.
  const TimePoint now = executor_.Now();
  for (auto& [number, rank] : replica.ranks) {
    if (!rank.request || rank.request->deadline > now + kSameMoment) continue;
    EndRequest(rank, StillWaiting(rank, who), {});
  }
}

void Core::EndRequest(RankState& rank, const Status& status, Version live) {
  if (!rank.request) return;
  executor_.CancelTimer(rank.request->timer);
  proto::RequestFailed reply;
  reply.set_request(rank.request->id);
  *reply.mutable_rank() = rpc::ToProto(rank.identity);
  if (status.ok()) {
    reply.set_live_version(live.value);
  } else {
    metrics_.requests_failed.Increment();
    *reply.mutable_error() = rpc::ToProto(status);
  }
  rank.request.reset();
  SendTo(rank.agent, Wrap(&proto::DaemonMessage::mutable_request_failed, std::move(reply)));
}

void Core::EndRequests(Replica& replica, const Status& status, Version live) {
  for (auto& [number, rank] : replica.ranks) EndRequest(rank, status, live);
}

void Core::TryOpen(Channel& channel, Replica& replica) {
  if (replica.session.value != 0 || !replica.complete() || replica.assembly != 0) return;
  const RankState* first = nullptr;
  for (const auto& [number, rank] : replica.ranks) {
    if (!rank.request) return;
    if (first == nullptr) first = &rank;
    if (rank.request->selector == first->request->selector &&
        rank.request->version == first->request->version) {
      continue;
    }
    EndRequests(
        replica,
        Status(Code::kInvalidArgument,
               fmt::format("{} asks for {} {}, {} for {} {}; all ranks of a replica must ask "
                           "for the same",
                           first->identity.ToString(), SelectorName(first->request->selector),
                           first->request->version.value, rank.identity.ToString(),
                           SelectorName(rank.request->selector), rank.request->version.value),
               Reason::kMalformed),
        {});
    return;
  }
  if (!replica.fault.ok()) return EndRequests(replica, replica.fault, {});
  // A replica whose ranks serve different versions holds a mixture, like a dirty one.
  const bool mixed =
      std::any_of(replica.ranks.begin(), replica.ranks.end(),
                  [&](const auto& entry) { return entry.second.live != first->live; });
  const Choice choice = ChooseVersion(channel, first->request->selector, first->request->version,
                                      replica.live(), replica.dirty() || mixed);
  switch (choice.kind) {
    case Choice::Kind::kWait:
      return;
    case Choice::Kind::kAlready:
      return EndRequests(replica, {}, choice.version);
    case Choice::Kind::kFail:
      return EndRequests(replica, choice.status, {});
    case Choice::Kind::kOpen:
      if (sessions_.size() >= kMaxRunningSessions) {
        return EndRequests(
            replica,
            Status(Code::kResourceExhausted,
                   fmt::format("{} sessions run already", sessions_.size()), Reason::kBusy),
            {});
      }
      return OpenSession(channel, replica, channel.versions.at(choice.version));
  }
}

std::vector<Session::Participant> Core::ParticipantsOf(const Channel& channel,
                                                       const Replica& replica) const {
  std::map<std::string, Session::Participant> by_agent;
  const auto of = [&](const std::string& name) -> Session::Participant& {
    Session::Participant& participant = by_agent[name];
    if (participant.agent.empty()) {
      const Agent& agent = agents_.at(name);
      participant.agent = name;
      participant.host = agent.host;
      participant.endpoints = agent.endpoints;
    }
    return participant;
  };
  for (const auto& [number, rank] : channel.producer.ranks) {
    of(rank.agent).source_ranks.push_back(number);
  }
  for (const auto& [number, rank] : replica.ranks) of(rank.agent).target_ranks.push_back(number);
  std::vector<Session::Participant> out;
  for (auto& [name, participant] : by_agent) out.push_back(std::move(participant));
  return out;
}

void Core::OpenSession(Channel& channel, Replica& replica, const VersionState& version) {
  const TimePoint now = executor_.Now();
  Result<std::string> capability = RandomSecret();
  if (!capability.ok()) {
    return EndRequests(replica, capability.status().Annotate("secret of a session"), {});
  }
  Session::Config config;
  config.capability = *std::move(capability);
  config.id = SessionId{next_session_++};
  config.channel = channel.name;
  config.epoch = channel.epoch;
  config.version = version.version;
  config.source_job = channel.producer.job;
  config.target_job = replica.job;
  config.replica = replica.replica;
  config.source = channel.producer.layout;
  config.target = replica.layout;
  config.participants = ParticipantsOf(channel, replica);
  config.flip = replica.ranks.begin()->second.flip;
  config.proof = replica.ranks.begin()->second.proof;
  config.from_snapshot = version.snapshot();
  config.started = now;
  config.deadline = TimePoint::max();
  for (auto& [number, rank] : replica.ranks) {
    config.deadline = std::min(config.deadline, rank.request->deadline);
    executor_.CancelTimer(rank.request->timer);  // the session's deadline counts from here
  }
  if (const auto known = known_plans_.find(PlanKey(config)); known != known_plans_.end()) {
    config.plan_digest = known->second;
  }
  const SessionId id = config.id;
  replica.session = id;
  ++replica.session_count;
  RunningSession running{.session = Session(std::move(config)),
                         .timer = 0,
                         .phase_since = now,
                         .realtime_begin_ns = 0};
  running.timer =
      executor_.PostAt(running.session.config().deadline, [this, id] { SessionTimedOut(id); });
  const auto& placed = sessions_.emplace(id, std::move(running)).first->second;
  Log(LogLevel::kInfo, "session_open",
      {{"session", id.value},
       {"replica", ReplicaName(channel, replica)},
       {"version", version.version.value},
       {"known_plan", placed.session.config().plan_digest.has_value()}});
  EndPhase(sessions_.at(id), "", nullptr);
  SendToParticipants(placed.session,
                     Wrap(&proto::DaemonMessage::mutable_prepare,
                          placed.session.PrepareMessage(placed.session.config().deadline - now)),
                     false, false);
  UpdateGauges();
}

}  // namespace tensorbus::daemon
