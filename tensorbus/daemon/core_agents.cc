#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/log.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

constexpr std::size_t kMaxEndpoints = 64;
constexpr std::size_t kMaxEndpointBytes = 512;

Status CheckHello(const proto::Hello& hello) {
  if (hello.protocol() != rpc::kControlProtocol) {
    return {Code::kFailedPrecondition,
            fmt::format("agent {} speaks protocol {}, this daemon speaks {}; install the same "
                        "release on both",
                        hello.agent(), hello.protocol(), rpc::kControlProtocol),
            Reason::kProtocolVersion};
  }
  TB_RETURN_IF_ERROR(rpc::CheckName("the agent's name", hello.agent()));
  if (!hello.host().empty()) {
    TB_RETURN_IF_ERROR(rpc::CheckName("the host's name", hello.host()));
  }
  bool fine = static_cast<std::size_t>(hello.endpoints_size()) <= kMaxEndpoints;
  for (const std::string& endpoint : hello.endpoints()) {
    fine = fine && endpoint.size() <= kMaxEndpointBytes && IsPrintable(endpoint);
  }
  if (fine) return {};
  return {Code::kInvalidArgument, "a Hello with endpoints out of bounds", Reason::kMalformed};
}

}  // namespace

Core::Core(CoreOptions options, Executor& executor, SideWork& side_work, DaemonMetrics& metrics)
    : options_(std::move(options)),
      executor_(executor),
      side_work_(side_work),
      metrics_(metrics),
      started_(executor.Now()),
      next_session_(options_.first_session) {}

Core::~Core() = default;

void Core::OnAttach(rpc::PortId port, std::shared_ptr<rpc::AgentPort> agent,
                    const std::string& peer) {
  if (ports_.size() >= kMaxAgents) {
    agent->Close(Status(Code::kResourceExhausted,
                        fmt::format("{} agents are attached already", ports_.size()),
                        Reason::kBusy));
    return;
  }
  ports_.emplace(
      port,
      Port{.port = std::move(agent), .peer = peer, .agent = {}, .last_heard = executor_.Now()});
  executor_.PostAfter(options_.hello_timeout, [this, port] {
    const auto found = ports_.find(port);
    if (found == ports_.end() || !found->second.agent.empty() || found->second.waiting) return;
    DropPort(port, Status(Code::kDeadlineExceeded, "no Hello came", Reason::kPeerLost));
  });
  if (!silence_timer_) {
    silence_timer_ = true;
    executor_.PostAfter(options_.heartbeat, [this] { CheckSilence(); });
  }
}

void Core::CheckSilence() {
  const TimePoint limit = executor_.Now() - options_.agent_silence;
  std::vector<rpc::PortId> silent;
  for (const auto& [id, port] : ports_) {
    if (!port.agent.empty() && port.last_heard < limit) silent.push_back(id);
  }
  for (const rpc::PortId id : silent) {
    DropPort(id,
             Status(Code::kUnavailable,
                    fmt::format("nothing was heard for {:.0f} s", Seconds(options_.agent_silence)),
                    Reason::kPeerLost));
  }
  silence_timer_ = !ports_.empty();
  if (silence_timer_) executor_.PostAfter(options_.heartbeat, [this] { CheckSilence(); });
}

void Core::OnMessage(rpc::PortId port, const proto::AgentMessage& message) {
  const auto found = ports_.find(port);
  if (found == ports_.end()) return;  // dropped; its last messages are still coming
  metrics_.messages.Increment();
  found->second.last_heard = executor_.Now();
  if (found->second.agent.empty()) {
    if (message.has_hello() && !found->second.waiting) return Greet(port, message.hello());
    return DropPort(port, Status(Code::kFailedPrecondition,
                                 "before Welcome an agent says one Hello and nothing else",
                                 Reason::kMalformed));
  }
  Dispatch(agents_.at(found->second.agent), message);
}

void Core::Greet(rpc::PortId id, const proto::Hello& hello) {
  if (const Status status = CheckHello(hello); !status.ok()) return Refuse(id, status);
  if (agents_.contains(hello.agent())) return AwaitName(id, hello);
  Admit(id, hello);
}

void Core::Refuse(rpc::PortId id, const Status& status) {
  Port& port = ports_.at(id);
  Log(LogLevel::kWarn, "agent_refused", {{"peer", port.peer}, {"error", status}});
  proto::Welcome welcome;
  welcome.set_protocol(rpc::kControlProtocol);
  welcome.set_daemon(options_.name);
  *welcome.mutable_error() = rpc::ToProto(status);
  port.port->Send(Wrap(&proto::DaemonMessage::mutable_welcome, std::move(welcome)));
  DropPort(id, status);
}

void Core::Admit(rpc::PortId id, const proto::Hello& hello) {
  Port& port = ports_.at(id);
  port.agent = hello.agent();
  agents_.emplace(hello.agent(),
                  Agent{.name = hello.agent(),
                        .host = hello.host(),
                        .pid = hello.pid(),
                        .endpoints = {hello.endpoints().begin(), hello.endpoints().end()},
                        .port = id,
                        .ranks = {}});
  proto::Welcome welcome;
  welcome.set_protocol(rpc::kControlProtocol);
  welcome.set_daemon(options_.name);
  welcome.set_data_token(options_.data_token);
  welcome.set_heartbeat_ms(static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(options_.heartbeat).count()));
  port.port->Send(Wrap(&proto::DaemonMessage::mutable_welcome, std::move(welcome)));
  Log(LogLevel::kInfo, "agent_attached",
      {{"agent", hello.agent()}, {"host", hello.host()}, {"peer", port.peer}});
  UpdateGauges();
}

// Either the same agent again, whose old stream is dead without our having heard of it yet, or
// another one that was given the same name. Whether the old one still beats tells them apart; if
// its end comes first, the name is free at once.
void Core::AwaitName(rpc::PortId id, const proto::Hello& hello) {
  ports_.at(id).waiting = hello;
  executor_.PostAfter(options_.heartbeat * rpc::kBeatsToKeepAName,
                      [this, id, asked = executor_.Now()] { DecideName(id, asked); });
}

void Core::DecideName(rpc::PortId id, TimePoint asked) {
  const auto found = ports_.find(id);
  if (found == ports_.end() || !found->second.waiting) return;
  const Agent& holder = agents_.at(found->second.waiting->agent());
  const Port& old = ports_.at(holder.port);
  // What a dead one had said may have come in after the Hello, but not a beat later.
  if (old.last_heard >= asked + options_.heartbeat) {
    return Refuse(
        id, Status(Code::kAlreadyExists,
                   fmt::format("an agent named '{}' is attached already: process {} on host {}, "
                               "from {}; give this one another --name, or stop that one",
                               holder.name, holder.pid, holder.host, old.peer)));
  }
  DropPort(holder.port,
           Status(Code::kUnavailable, "it was silent when an agent of its name attached",
                  Reason::kPeerLost));
  // Now whoever waited longest is in, which need not be us.
  if (found->second.waiting) AwaitName(id, proto::Hello(*found->second.waiting));
}

void Core::Dispatch(Agent& agent, const proto::AgentMessage& message) {
  switch (message.body_case()) {
    case proto::AgentMessage::kHello:
      return DropPort(agent.port,
                      Status(Code::kFailedPrecondition, "a second Hello", Reason::kMalformed));
    case proto::AgentMessage::kRegisterRank:
      return OnRegister(agent, message.register_rank());
    case proto::AgentMessage::kLeaveRank:
      return OnLeave(agent, message.leave_rank());
    case proto::AgentMessage::kPublish:
      return OnPublish(agent, message.publish());
    case proto::AgentMessage::kRequestRelease:
      return OnRequestRelease(agent, message.request_release());
    case proto::AgentMessage::kRequestVersion:
      return OnRequestVersion(agent, message.request_version());
    case proto::AgentMessage::kCancelRequest:
      return OnCancelRequest(agent, message.cancel_request());
    case proto::AgentMessage::kSessionReady:
    case proto::AgentMessage::kSessionReceipt:
    case proto::AgentMessage::kSourceDone:
    case proto::AgentMessage::kFlipReady:
    case proto::AgentMessage::kFlipDone:
    case proto::AgentMessage::kSessionFailed:
      return OnSessionMessage(agent, message);
    case proto::AgentMessage::kAnswer:
      return OnAnswer(agent, message.answer());
    case proto::AgentMessage::kClaimVersion:
      return OnClaim(agent, message.claim_version());
    case proto::AgentMessage::kExplainWait:
      return OnExplainWait(agent, message.explain_wait());
    case proto::AgentMessage::kHeartbeat:
      return;
    case proto::AgentMessage::BODY_NOT_SET:
      break;
  }
  Log(LogLevel::kWarn, "message_unknown", {{"agent", agent.name}});
}

void Core::OnDetach(rpc::PortId port, const Status& why) {
  DropPort(port,
           why.ok() ? Status(Code::kUnavailable, "its connection ended", Reason::kPeerLost) : why);
}

void Core::DropPort(rpc::PortId id, const Status& why) {
  const auto found = ports_.find(id);
  if (found == ports_.end()) return;
  const Port port = std::move(found->second);
  ports_.erase(found);
  port.port->Close(why);
  if (!port.agent.empty()) AgentGone(port.agent, why);
}

void Core::AgentGone(const std::string& name, const Status& why) {
  const auto found = agents_.find(name);
  if (found == agents_.end()) return;
  const Agent agent = std::move(found->second);
  agents_.erase(found);
  metrics_.agents_lost.Increment();
  Log(LogLevel::kWarn, "agent_lost",
      {{"agent", name}, {"ranks", agent.ranks.size()}, {"error", why}});
  std::erase_if(registering_, [&](const auto& entry) {
    if (entry.second.agent != name) return false;
    side_work_.Cancel(entry.second.ticket);
    return true;
  });
  for (const RankKey& key : agent.ranks) {
    RankGone(key,
             Status(Code::kUnavailable, fmt::format("lost agent {}: {}", name, why.message()),
                    Reason::kPeerLost),
             /*may_return=*/true);
  }
  std::vector<std::uint64_t> asked;
  for (const auto& [id, query] : queries_) {
    if (query.agent == name) asked.push_back(id);
  }
  for (const std::uint64_t id : asked) {
    auto node = queries_.extract(id);
    if (node.empty()) continue;
    executor_.CancelTimer(node.mapped().timer);
    node.mapped().done(
        Status(Code::kUnavailable, fmt::format("agent {} was lost", name), Reason::kPeerLost));
  }
  UpdateGauges();
  for (auto& [id, port] : ports_) {
    if (!port.waiting || port.waiting->agent() != name) continue;
    return Admit(id, *std::exchange(port.waiting, std::nullopt));
  }
}

void Core::SendTo(const std::string& agent, proto::DaemonMessage message) {
  const auto found = agents_.find(agent);
  if (found == agents_.end()) return;
  ports_.at(found->second.port).port->Send(std::move(message));
}

void Core::Ask(const std::string& agent, proto::Query query, Nanos timeout,
               std::function<void(Result<proto::Answer>)> done) {
  if (!agents_.contains(agent) || queries_.size() >= kMaxPendingQueries) {
    const Status status =
        agents_.contains(agent)
            ? Status(Code::kResourceExhausted, "too many questions are open", Reason::kBusy)
            : Status(Code::kUnavailable, fmt::format("agent {} is not attached", agent),
                     Reason::kPeerLost);
    executor_.Post([done = std::move(done), status] { done(status); });
    return;
  }
  const std::uint64_t id = next_query_++;
  query.set_query(id);
  const auto timer = executor_.PostAfter(timeout, [this, id, timeout] {
    auto node = queries_.extract(id);
    if (node.empty()) return;
    node.mapped().done(Status(Code::kDeadlineExceeded,
                              fmt::format("agent {} has not answered within {:.1f} s",
                                          node.mapped().agent, Seconds(timeout)),
                              Reason::kMissingRank));
  });
  queries_.emplace(id, PendingQuery{.agent = agent, .done = std::move(done), .timer = timer});
  SendTo(agent, Wrap(&proto::DaemonMessage::mutable_query, std::move(query)));
}

void Core::OnAnswer(const Agent& agent, const proto::Answer& answer) {
  const auto found = queries_.find(answer.query());
  if (found == queries_.end() || found->second.agent != agent.name) return;
  auto node = queries_.extract(found);
  executor_.CancelTimer(node.mapped().timer);
  const Status status = rpc::FromProto(answer.error());
  if (status.ok()) {
    node.mapped().done(answer);
  } else {
    node.mapped().done(status.Annotate("agent " + agent.name));
  }
}

void Core::OnGetLayout(const Hash128& hash, OnLayout done) {
  const auto found = layouts_.find(hash);
  const auto entry = found == layouts_.end() ? nullptr : found->second.lock();
  if (entry == nullptr) {
    return done(Status(Code::kNotFound, "no registered job has the layout " + hash.ToHex()));
  }
  done(entry->blob);
}

void Core::UpdateGauges() {
  std::size_t ranks = 0;
  for (const auto& [name, agent] : agents_) ranks += agent.ranks.size();
  metrics_.agents.Set(static_cast<double>(agents_.size()));
  metrics_.ranks.Set(static_cast<double>(ranks));
  metrics_.channels.Set(static_cast<double>(channels_.size()));
  metrics_.sessions_running.Set(static_cast<double>(sessions_.size()));
}

Core::Counts Core::counts() const {
  Counts out;
  out.agents = agents_.size();
  out.sessions = sessions_.size();
  out.queries = queries_.size();
  out.registrations = registering_.size();
  for (const auto& [name, agent] : agents_) out.ranks += agent.ranks.size();
  for (const auto& [name, channel] : channels_) out.kept_versions += channel.versions.size();
  return out;
}

}  // namespace tensorbus::daemon
