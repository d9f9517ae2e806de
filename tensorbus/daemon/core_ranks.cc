#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/coverage.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

constexpr std::size_t kMaxLeaveOut = kMaxTensors;

/// Nothing registers here any more and no number has to be remembered.
bool Forgettable(const Channel& channel) {
  return channel.producer.job.empty() && channel.replicas.empty() && channel.newest.value == 0;
}

Status Taken(const RankState& holder) {
  return {Code::kAlreadyExists,
          fmt::format("{} is registered already (process {} at agent {}); end that process first",
                      holder.identity.ToString(), holder.pid, holder.agent)};
}

bool KnownFlip(std::uint32_t flip) {
  return flip == static_cast<std::uint32_t>(FlipMode::kInPlace) ||
         flip == static_cast<std::uint32_t>(FlipMode::kShadow);
}

}  // namespace

RankState* Core::FindRank(const RankKey& key) {
  const auto found = channels_.find(key.channel);
  if (found == channels_.end()) return nullptr;
  Channel& channel = found->second;
  if (key.role == Role::kProducer) {
    if (channel.producer.job != key.job) return nullptr;
    const auto rank = channel.producer.ranks.find(key.rank);
    return rank == channel.producer.ranks.end() ? nullptr : &rank->second;
  }
  const auto replica = channel.replicas.find({key.job, key.replica});
  if (replica == channel.replicas.end()) return nullptr;
  const auto rank = replica->second.ranks.find(key.rank);
  return rank == replica->second.ranks.end() ? nullptr : &rank->second;
}

RankState* Core::FindOwn(const Agent& agent, const RankIdentity& identity) {
  RankState* rank = FindRank(KeyOf(identity));
  return rank != nullptr && rank->agent == agent.name ? rank : nullptr;
}

std::shared_ptr<const LayoutEntry> Core::Share(std::shared_ptr<const LayoutEntry> entry) {
  std::weak_ptr<const LayoutEntry>& known = layouts_[entry->hash];
  if (auto same = known.lock()) return same;
  known = entry;
  std::erase_if(layouts_, [](const auto& item) { return item.second.expired(); });
  return entry;
}

void Core::OnRegister(Agent& agent, const proto::RegisterRank& message) {
  proto::RankRegistered reply;
  reply.set_request(message.request());
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  const Status status = identity.ok() ? Register(agent, *identity, message) : identity.status();
  if (!status.ok()) {
    metrics_.ranks_refused.Increment();
    Log(LogLevel::kWarn, "rank_refused", {{"agent", agent.name}, {"status", status}});
    *reply.mutable_error() = rpc::ToProto(status);
  } else {
    const Channel& channel = channels_.at(identity->channel);
    reply.set_channel_epoch(channel.epoch.value);
    reply.set_latest_version(channel.newest.value);
    Log(LogLevel::kInfo, "rank_registered",
        {{"rank", identity->ToString()}, {"agent", agent.name}, {"epoch", channel.epoch.value}});
  }
  SendTo(agent.name, Wrap(&proto::DaemonMessage::mutable_rank_registered, std::move(reply)));
  UpdateGauges();
}

Status Core::Register(Agent& agent, const RankIdentity& identity,
                      const proto::RegisterRank& message) {
  TB_ASSIGN_OR_RETURN(RankLayout layout,
                      ParseRankLayout(rpc::BytesOf(message.layout()), identity.rank));
  RankState rank;
  rank.identity = identity;
  rank.agent = agent.name;
  rank.pid = message.pid();
  rank.mode = static_cast<MemoryMode>(std::clamp<std::uint32_t>(message.memory_mode(), 1, 3));
  rank.layout_hash = HashOf(layout);
  rank.layout_blob = message.layout();
  rank.bytes = BytesOfLayout(layout);
  rank.layout = std::make_shared<RankLayout>(std::move(layout));
  if (!channels_.contains(identity.channel) && channels_.size() >= kMaxChannels) {
    return {Code::kResourceExhausted,
            fmt::format("this daemon serves {} channels already", channels_.size()), Reason::kBusy};
  }
  Channel& channel = channels_[identity.channel];
  channel.name = identity.channel;
  const Status status = identity.role == Role::kProducer
                            ? RegisterProducer(agent, channel, std::move(rank), message)
                            : RegisterConsumer(agent, channel, std::move(rank), message);
  if (status.ok()) {
    agent.ranks.insert(KeyOf(identity));
    ReconcileLater(identity.channel);
  } else if (Forgettable(channel)) {
    channels_.erase(identity.channel);
  }
  return status;
}

Status Core::RegisterProducer(Agent& agent, Channel& channel, RankState rank,
                              const proto::RegisterRank& message) {
  const RankIdentity identity = rank.identity;
  Producer& producer = channel.producer;
  const std::string who = identity.ToString();
  if (producer.job != identity.job && !producer.ranks.empty()) {
    const RankState& holder = producer.ranks.begin()->second;
    return {Code::kAlreadyExists,
            fmt::format("{} cannot publish: channel {} is produced by job {} ({}, process {} at "
                        "agent {}); stop that job first, or use another channel",
                        who, channel.name, producer.job, holder.identity.ToString(), holder.pid,
                        holder.agent),
            Reason::kSecondPublisher};
  }
  const auto holder = producer.ranks.find(identity.rank);
  if (producer.job == identity.job && holder != producer.ranks.end()) return Taken(holder->second);

  const ProcessMark mark{.host = agent.host, .pid = rank.pid, .layout_hash = rank.layout_hash};
  const bool same_job = producer.job == identity.job && producer.rank_count == identity.rank_count;
  const auto marked = producer.marks.find(identity.rank);
  const bool used = same_job && marked != producer.marks.end();
  const bool same_process = used && rank.pid != 0 && marked->second == mark;
  const std::uint64_t known = message.known_epoch();
  const bool came_back = known != 0 && known >= channel.epoch.value &&
                         (same_job || producer.ranks.empty()) &&
                         (known == channel.epoch.value || !producer.fresh);
  if (known != 0 && !came_back && !same_process) {
    channel.epoch = std::max(channel.epoch, ChannelEpoch{known});
    return {Code::kFailedPrecondition,
            fmt::format("{} belongs to epoch {} of channel {}, which is over (now {}); restart all "
                        "ranks of the job",
                        who, known, channel.name, channel.epoch.value),
            Reason::kStaleVersion};
  }
  if (came_back || same_process) {
    if (producer.job != identity.job || producer.rank_count != identity.rank_count) {
      producer = Producer{};
      producer.job = identity.job;
      producer.rank_count = identity.rank_count;
    }
    channel.epoch = std::max(channel.epoch, ChannelEpoch{known});
    rank.published = Version{message.live_version()};
    rank.republish = rank.published;
    channel.newest = std::max(channel.newest, rank.published);
  } else if (!same_job && !producer.ranks.empty() && producer.ranks.size() < producer.rank_count &&
             producer.marks.size() < producer.rank_count) {
    return {Code::kInvalidArgument,
            fmt::format("{} says the job has {} ranks, the ranks before it said {}; start all with "
                        "the same number",
                        who, identity.rank_count, producer.rank_count),
            Reason::kLayoutMismatch};
  } else if (!same_job || used || producer.ranks.empty()) {
    BeginGeneration(channel, identity, who + " registered anew");
  }

  producer.ranks.emplace(identity.rank, std::move(rank));
  producer.marks[identity.rank] = mark;
  if (producer.ranks.size() < producer.rank_count) return {};
  Result<std::shared_ptr<const LayoutEntry>> combined = CombineLayouts(producer.ranks);
  if (!combined.ok()) {
    producer.ranks.erase(identity.rank);
    producer.marks.erase(identity.rank);
    return combined.status().Annotate(who);
  }
  producer.layout = Share(std::move(combined).value());
  for (auto& [number, state] : producer.ranks) state.layout.reset();
  Log(LogLevel::kInfo, "producer_complete",
      {{"channel", channel.name},
       {"job", producer.job},
       {"ranks", producer.rank_count},
       {"tensors", producer.layout->layout.tensors.size()},
       {"epoch", channel.epoch.value}});
  ManifestKnown(channel);
  return {};
}

void Core::BeginGeneration(Channel& channel, const RankIdentity& identity, const std::string& why) {
  Producer& producer = channel.producer;
  const Status over(Code::kFailedPrecondition, why + ": the channel's epoch is over",
                    Reason::kStaleVersion);
  for (const auto& [number, rank] : producer.ranks) {
    const RankKey key = KeyOf(rank.identity);
    AbortSessionsOf(key, over);
    if (const auto agent = agents_.find(rank.agent); agent != agents_.end()) {
      agent->second.ranks.erase(key);
    }
  }
  while (!channel.versions.empty()) Retire(channel, channel.versions.begin()->first);
  producer = Producer{};
  producer.job = identity.job;
  producer.rank_count = identity.rank_count;
  producer.fresh = true;
  ++channel.epoch.value;
}

Status Core::RegisterConsumer(Agent& agent, Channel& channel, RankState rank,
                              const proto::RegisterRank& message) {
  const RankIdentity identity = rank.identity;
  const std::string who = identity.ToString();
  if (!KnownFlip(message.flip()) || message.proof() < 1 || message.proof() > 4 ||
      static_cast<std::size_t>(message.leave_out_size()) > kMaxLeaveOut) {
    return {Code::kInvalidArgument, who + " registered with an unknown flip mode or proof",
            Reason::kMalformed};
  }
  rank.flip = static_cast<FlipMode>(message.flip());
  rank.proof = static_cast<Proof>(message.proof());
  rank.leave_out = {message.leave_out().begin(), message.leave_out().end()};
  rank.live = Version{message.live_version()};
  rank.dirty = message.dirty();

  const ReplicaKey key{identity.job, identity.replica};
  const auto existing = channel.replicas.find(key);
  if (existing != channel.replicas.end()) {
    const Replica& replica = existing->second;
    if (const auto holder = replica.ranks.find(identity.rank); holder != replica.ranks.end()) {
      return Taken(holder->second);
    }
    if (replica.rank_count != identity.rank_count) {
      return {
          Code::kInvalidArgument,
          fmt::format("{} says the replica has {} ranks, the ranks before it said {}; start all "
                      "with the same number",
                      who, identity.rank_count, replica.rank_count),
          Reason::kLayoutMismatch};
    }
    const RankState& first = replica.ranks.begin()->second;
    if (first.flip != rank.flip || first.proof != rank.proof) {
      return {
          Code::kInvalidArgument,
          fmt::format("{} registered with flip {} and proof {}, {} with {} and {}; all ranks of "
                      "a replica must agree",
                      who, FlipName(rank.flip), ProofName(rank.proof), first.identity.ToString(),
                      FlipName(first.flip), ProofName(first.proof)),
          Reason::kLayoutMismatch};
    }
  } else if (channel.replicas.size() >= kMaxReplicasOfChannel) {
    return {
        Code::kResourceExhausted,
        fmt::format("channel {} has {} replicas already", channel.name, channel.replicas.size()),
        Reason::kBusy};
  }
  if (channel.producer.complete()) {
    TB_RETURN_IF_ERROR(
        CheckRankFits(channel.producer.layout->layout, *rank.layout, rank.leave_out, who));
  }

  Replica& replica = channel.replicas[key];
  replica.job = identity.job;
  replica.replica = identity.replica;
  replica.rank_count = identity.rank_count;
  const Version live = rank.live;
  replica.ranks.emplace(identity.rank, std::move(rank));
  Status status;
  if (replica.ranks.size() == replica.rank_count) {
    Result<std::shared_ptr<const LayoutEntry>> combined = CombineLayouts(replica.ranks);
    if (combined.ok()) {
      replica.layout = Share(std::move(combined).value());
      for (auto& [number, state] : replica.ranks) state.layout.reset();
      CheckReplica(channel, replica);
      status = replica.fault;
    } else {
      status = combined.status().Annotate(who);
    }
  } else {
    replica.fault = {};
  }
  if (!status.ok()) {
    replica.layout.reset();
    replica.ranks.erase(identity.rank);
    if (replica.ranks.empty()) channel.replicas.erase(key);
    return status;
  }
  // Numbers never go back, also when they are remembered by the engines only.
  channel.newest = std::max(channel.newest, live);
  const std::uint64_t over = message.known_epoch() + (channel.producer.fresh ? 1 : 0);
  if (message.known_epoch() > channel.epoch.value) channel.epoch = ChannelEpoch{over};
  static_cast<void>(agent);
  return {};
}

void Core::CheckReplica(Channel& channel, Replica& replica) {
  replica.fault = {};
  if (!channel.producer.complete()) return;
  const JobLayout& manifest = channel.producer.layout->layout;
  std::vector<std::string> leave_out;
  for (const auto& [number, rank] : replica.ranks) {
    const Result<std::shared_ptr<const RankLayout>> layout = LayoutOf(rank);
    replica.fault =
        layout.ok() ? CheckRankFits(manifest, **layout, rank.leave_out, rank.identity.ToString())
                    : layout.status();
    if (!replica.fault.ok()) break;
    leave_out.insert(leave_out.end(), rank.leave_out.begin(), rank.leave_out.end());
  }
  if (replica.fault.ok() && replica.complete()) {
    replica.fault = CheckReplicaCovers(manifest, replica.layout->layout, leave_out,
                                       ReplicaName(channel, replica));
  }
  if (replica.fault.ok()) return;
  Log(LogLevel::kWarn, "replica_does_not_fit",
      {{"replica", ReplicaName(channel, replica)}, {"status", replica.fault}});
  EndRequests(replica, replica.fault, {});
}

void Core::ManifestKnown(Channel& channel) {
  for (auto& [key, replica] : channel.replicas) CheckReplica(channel, replica);
}

void Core::OnLeave(Agent& agent, const proto::LeaveRank& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  if (!identity.ok() || FindOwn(agent, *identity) == nullptr) return;
  const RankKey key = KeyOf(*identity);
  agent.ranks.erase(key);
  const std::string why = message.why().empty()
                              ? (message.on_purpose() ? "it left on purpose" : "it went away")
                              : message.why();
  RankGone(key, Status(Code::kUnavailable, why, Reason::kPeerLost));
  UpdateGauges();
}

void Core::RankGone(const RankKey& key, const Status& why) {
  RankState* rank = FindRank(key);
  if (rank == nullptr) return;
  const Status named(why.code(),
                     fmt::format("{} was lost: {}", rank->identity.ToString(), why.message()),
                     why.reason(), why.native());
  Log(LogLevel::kInfo, "rank_gone", {{"rank", rank->identity.ToString()}, {"why", why.message()}});
  Channel& channel = channels_.at(key.channel);
  AbortSessionsOf(key, named);
  ReconcileLater(channel.name);
  if (key.role == Role::kProducer) return ProducerRankGone(channel, key.rank, named);
  Replica& replica = channel.replicas.at({key.job, key.replica});
  if (rank->request) executor_.CancelTimer(rank->request->timer);
  replica.ranks.erase(key.rank);
  replica.layout.reset();
  if (replica.ranks.empty()) channel.replicas.erase({key.job, key.replica});
}

void Core::ProducerRankGone(Channel& channel, std::uint32_t rank, const Status& why) {
  // Without one of its sources no version can be served; nobody reads the others' memory now.
  for (auto& [number, version] : channel.versions) {
    if (const auto wait = version.waits.find(rank); wait != version.waits.end()) {
      executor_.CancelTimer(wait->second.timer);
      version.waits.erase(wait);
    }
  }
  while (!channel.versions.empty()) Retire(channel, channel.versions.begin()->first);
  channel.producer.ranks.erase(rank);
  channel.producer.layout.reset();
  Log(LogLevel::kWarn, "producer_incomplete", {{"channel", channel.name}, {"status", why}});
}

}  // namespace tensorbus::daemon
