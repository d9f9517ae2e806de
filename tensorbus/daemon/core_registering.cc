#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

// A registration's way: its layout is parsed and checked on a side thread, entered on the executor,
// and, when it is its job's last, put together with the others' on the side thread again. Whatever
// changed meanwhile is looked at when the outcome comes back.
namespace tensorbus::daemon {

namespace {

std::string WorkOf(const RankIdentity& identity) {
  return "registering " + identity.ToString();
}

RankPart PartOf(const RankIdentity& identity,
                const std::shared_ptr<const proto::RegisterRank>& message) {
  return {.rank = identity.rank,
          .blob = {message, &message->layout()},
          .bytes = 0,
          .claim = {.who = identity.ToString(),
                    .leave_out = {message->leave_out().begin(), message->leave_out().end()}}};
}

}  // namespace

void Core::OnRegister(Agent& agent, const proto::RegisterRank& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  if (!identity.ok()) {
    return AnswerRegister(agent.name, message.request(), nullptr, identity.status());
  }
  const RankKey key = KeyOf(*identity);
  if (const auto busy = registering_.find(key); busy != registering_.end()) {
    return AnswerRegister(
        agent.name, message.request(), &*identity,
        Status(
            Code::kAlreadyExists,
            fmt::format("{} is being registered by process {} at agent {}; end that process first",
                        identity->ToString(), busy->second.message->pid(), busy->second.agent)));
  }
  registering_.emplace(key, Registering{.number = next_work_++,
                                        .agent = agent.name,
                                        .message = std::make_shared<proto::RegisterRank>(message),
                                        .identity = *identity,
                                        .manifest = nullptr,
                                        .ticket = 0});
  CheckRegistering(key);
}

void Core::CheckRegistering(const RankKey& key) {
  Registering& registering = registering_.at(key);
  const auto channel = channels_.find(key.channel);
  registering.manifest = nullptr;
  if (key.role == Role::kConsumer && channel != channels_.end()) {
    registering.manifest = channel->second.producer.layout;
  }
  registering.ticket = side_work_.Start<RankSummary>(
      SideWork::Lane::kRegistrations, WorkOf(registering.identity),
      executor_.Now() + options_.work_timeout,
      [part = PartOf(registering.identity, registering.message), manifest = registering.manifest] {
        return CheckRank(part, manifest.get());
      },
      [this, key, number = registering.number](const Result<RankSummary>& checked) {
        const auto found = registering_.find(key);
        if (found != registering_.end() && found->second.number == number) Enter(key, checked);
      });
}

void Core::Enter(const RankKey& key, const Result<RankSummary>& checked) {
  const Registering& registering = registering_.at(key);
  const auto found = channels_.find(key.channel);
  if (key.role == Role::kConsumer) {
    const auto manifest = found == channels_.end() ? nullptr : found->second.producer.layout;
    // What fits some manifest may be entered while there is none.
    const bool settled = manifest == registering.manifest || (manifest == nullptr && checked.ok());
    if (!settled) return CheckRegistering(key);
  }
  if (!checked.ok()) return EndRegistering(key, checked.status());
  const Status entered = Register(agents_.at(registering.agent), registering, *checked);
  if (!entered.ok()) return EndRegistering(key, entered);
  Channel& channel = channels_.at(key.channel);
  if (key.role == Role::kProducer) {
    if (channel.producer.ranks.size() == channel.producer.rank_count) {
      return AssembleProducer(channel, key);
    }
  } else {
    Replica& replica = channel.replicas.at({key.job, key.replica});
    if (replica.ranks.size() == replica.rank_count) return AssembleReplica(channel, replica, key);
    replica.fault = {};
  }
  EndRegistering(key, {});
}

void Core::EndRegistering(const RankKey& key, const Status& status) {
  auto node = registering_.extract(key);
  const Registering& registering = node.mapped();
  const proto::RegisterRank& message = *registering.message;
  if (status.ok()) {
    if (key.role == Role::kConsumer) {
      // Numbers never go back, also when they are remembered by the engines only; nor do epochs.
      Channel& channel = channels_.at(key.channel);
      channel.epoch = RaisedEpoch(channel, message).value();
      channel.newest = std::max(channel.newest, Version{message.live_version()});
    }
    ReconcileLater(key.channel);
  } else {
    if (const auto agent = agents_.find(registering.agent); agent != agents_.end()) {
      if (FindOwn(agent->second, registering.identity) == nullptr) agent->second.ranks.erase(key);
    }
    ForgetIfEmpty(key.channel);
  }
  AnswerRegister(registering.agent, message.request(), &registering.identity, status);
}

// What the ranks of a job that began anew hear is the same for all of them, also for one that comes
// when the first have published already: from it they count their versions.
Version Core::LatestFor(const Channel& channel, const RankIdentity& identity) {
  if (identity.role == Role::kConsumer || !channel.producer.fresh) return channel.newest;
  const auto rank = channel.producer.ranks.find(identity.rank);
  const bool back = rank != channel.producer.ranks.end();
  return std::max(channel.producer.begun_above, back ? rank->second.published : Version());
}

void Core::AnswerRegister(const std::string& agent, std::uint64_t request,
                          const RankIdentity* identity, const Status& status) {
  proto::RankRegistered reply;
  reply.set_request(request);
  if (!status.ok()) {
    metrics_.ranks_refused.Increment();
    Log(LogLevel::kWarn, "rank_refused", {{"agent", agent}, {"error", status}});
    *reply.mutable_error() = rpc::ToProto(status);
  } else {
    const Channel& channel = channels_.at(identity->channel);
    reply.set_channel_epoch(channel.epoch.value);
    reply.set_latest_version(LatestFor(channel, *identity).value);
    Log(LogLevel::kInfo, "rank_registered",
        {{"rank", identity->ToString()}, {"agent", agent}, {"epoch", channel.epoch.value}});
  }
  SendTo(agent, Wrap(&proto::DaemonMessage::mutable_rank_registered, std::move(reply)));
  UpdateGauges();
}

// Other ranks came, went or began anew while the layouts were put together for nothing.
void Core::Superseded(const RankKey& last) {
  if (!registering_.contains(last)) return;  // it left, or its agent did
  if (FindRank(last) != nullptr) return EndRegistering(last, {});
  EndRegistering(last, Status(Code::kFailedPrecondition,
                              fmt::format("{} was registering when its job began anew; restart it",
                                          registering_.at(last).identity.ToString()),
                              Reason::kStaleVersion));
}

// ---- producers ----------------------------------------------------------------------------------

void Core::AssembleProducer(Channel& channel, const RankKey& last) {
  const std::uint64_t number = next_work_++;
  channel.producer.assembly = number;
  registering_.at(last).ticket = side_work_.Start<std::shared_ptr<const LayoutEntry>>(
      SideWork::Lane::kRegistrations, WorkOf(registering_.at(last).identity),
      executor_.Now() + options_.work_timeout,
      [parts = PartsOf(channel.producer.ranks)] { return Assemble(parts); },
      [this, number, last](Result<std::shared_ptr<const LayoutEntry>> assembled) {
        ProducerAssembled(number, last, std::move(assembled));
      });
}

void Core::ProducerAssembled(std::uint64_t number, const RankKey& last,
                             Result<std::shared_ptr<const LayoutEntry>> assembled) {
  const auto found = channels_.find(last.channel);
  if (found == channels_.end() || found->second.producer.assembly != number) {
    return Superseded(last);
  }
  Channel& channel = found->second;
  Producer& producer = channel.producer;
  producer.assembly = 0;
  if (!assembled.ok()) {
    const Status why = assembled.status().Annotate(registering_.at(last).identity.ToString());
    Suspend(channel, last.rank);
    producer.ranks.erase(last.rank);
    producer.marks.erase(last.rank);
    return EndRegistering(last, why);
  }
  producer.layout = Share(std::move(assembled).value());
  Log(LogLevel::kInfo, "producer_complete",
      {{"channel", channel.name},
       {"job", producer.job},
       {"ranks", producer.rank_count},
       {"tensors", producer.layout->layout.tensors.size()},
       {"epoch", channel.epoch.value}});
  CheckReplicas(channel);
  ShowReadable(channel);
  EndRegistering(last, {});
}

// ---- replicas -----------------------------------------------------------------------------------

void Core::AssembleReplica(Channel& channel, Replica& replica, const RankKey& last) {
  const std::uint64_t number = next_work_++;
  replica.assembly = number;
  const std::shared_ptr<const LayoutEntry> manifest = channel.producer.layout;
  registering_.at(last).ticket = side_work_.Start<std::shared_ptr<const LayoutEntry>>(
      SideWork::Lane::kRegistrations, WorkOf(registering_.at(last).identity),
      executor_.Now() + options_.work_timeout,
      [parts = PartsOf(replica.ranks), manifest,
       who = ReplicaName(channel, replica)]() -> Result<std::shared_ptr<const LayoutEntry>> {
        TB_ASSIGN_OR_RETURN(std::shared_ptr<const LayoutEntry> entry, Assemble(parts));
        if (manifest != nullptr) {
          TB_RETURN_IF_ERROR(CheckReplica(*manifest, parts, entry.get(), who));
        }
        return entry;
      },
      [this, number, last, manifest](Result<std::shared_ptr<const LayoutEntry>> assembled) {
        ReplicaAssembled(number, last, manifest, std::move(assembled));
      });
}

void Core::ReplicaAssembled(std::uint64_t number, const RankKey& last,
                            const std::shared_ptr<const LayoutEntry>& manifest,
                            Result<std::shared_ptr<const LayoutEntry>> assembled) {
  const auto channel = channels_.find(last.channel);
  if (channel == channels_.end()) return Superseded(last);
  auto& replicas = channel->second.replicas;
  const auto found = replicas.find({last.job, last.replica});
  if (found == replicas.end() || found->second.assembly != number) return Superseded(last);
  Replica& replica = found->second;
  const std::shared_ptr<const LayoutEntry>& now = channel->second.producer.layout;
  const bool checked = now == manifest || (now == nullptr && assembled.ok());
  if (!checked) return AssembleReplica(channel->second, replica, last);
  replica.assembly = 0;
  if (!assembled.ok()) {
    const Status why = assembled.status();
    replica.ranks.erase(last.rank);
    if (replica.ranks.empty()) replicas.erase(found);
    return EndRegistering(last, why);
  }
  replica.layout = Share(std::move(assembled).value());
  replica.fault = {};
  EndRegistering(last, {});
}

/// The channel's manifest is known now. Replicas that are being put together see that by
/// themselves.
void Core::CheckReplicas(Channel& channel) {
  for (auto& [key, replica] : channel.replicas) {
    if (replica.complete() || replica.ranks.size() < replica.rank_count) {
      StartReplicaCheck(channel, replica);
    }
  }
}

void Core::StartReplicaCheck(Channel& channel, Replica& replica) {
  const std::uint64_t number = next_work_++;
  replica.assembly = number;
  replica.fault = {};
  const std::string who = ReplicaName(channel, replica);
  side_work_.Start<bool>(
      SideWork::Lane::kRegistrations, "checking " + who, executor_.Now() + options_.work_timeout,
      [manifest = channel.producer.layout, parts = PartsOf(replica.ranks),
       combined = replica.layout, who]() -> Result<bool> {
        TB_RETURN_IF_ERROR(CheckReplica(*manifest, parts, combined.get(), who));
        return true;
      },
      [this, number, name = channel.name, key = ReplicaKey(replica.job, replica.replica)](
          const Result<bool>& checked) { ReplicaChecked(number, name, key, checked.status()); });
}

void Core::ReplicaChecked(std::uint64_t number, const std::string& name, const ReplicaKey& key,
                          const Status& fault) {
  const auto channel = channels_.find(name);
  if (channel == channels_.end()) return;
  const auto found = channel->second.replicas.find(key);
  if (found == channel->second.replicas.end() || found->second.assembly != number) return;
  Replica& replica = found->second;
  replica.assembly = 0;
  replica.fault = fault;
  if (fault.ok()) return ReconcileLater(name);
  Log(LogLevel::kWarn, "replica_does_not_fit",
      {{"replica", ReplicaName(channel->second, replica)}, {"error", fault}});
  EndRequests(replica, fault, {});
}

}  // namespace tensorbus::daemon
