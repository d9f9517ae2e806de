#include <algorithm>
#include <fmt/format.h>

#include "tensorbus/base/log.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/coverage.h"
#include "tensorbus/daemon/version_policy.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

constexpr std::size_t kMaxLeaveOut = kMaxTensors;

/// Of what an agent says of a rank's end.
constexpr std::size_t kMaxWhyBytes = 256;

/// It is empty, and no number of it has to be remembered. `first`: the epoch of channels that are
/// new. One above it has to be: to raise `first` instead would refuse producers of other channels
/// that are still to come back.
bool Forgettable(const Channel& channel, ChannelEpoch first) {
  return channel.empty() && channel.producer.job.empty() && channel.newest.value == 0 &&
         channel.epoch <= first;
}

Status Taken(const RankState& holder) {
  return {Code::kAlreadyExists,
          fmt::format("{} is registered already (process {} at agent {}); end that process first",
                      holder.identity.ToString(), holder.pid, holder.agent)};
}

/// Whether ranks that published to an earlier daemon make up this generation: then whoever is new
/// among them may be the successor of one that did, and its versions are not theirs.
bool OfAnEarlierLife(const Producer& producer) {
  return !producer.fresh &&
         std::any_of(producer.ranks.begin(), producer.ranks.end(),
                     [](const auto& entry) { return entry.second.published.value != 0; });
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

Status Core::Register(Agent& agent, const Registering& registering, const RankSummary& summary) {
  const RankIdentity& identity = registering.identity;
  const proto::RegisterRank& message = *registering.message;
  for (const std::uint64_t number : {message.live_version(), message.publishing()}) {
    TB_RETURN_IF_ERROR(CheckNumber(identity.ToString(), "registered with", Version{number}));
  }
  RankState rank;
  rank.identity = identity;
  rank.agent = agent.name;
  rank.pid = message.pid();
  rank.mode = static_cast<MemoryMode>(std::clamp<std::uint32_t>(message.memory_mode(), 1, 3));
  rank.layout_hash = summary.hash;
  rank.layout_blob = {registering.message, &message.layout()};
  rank.bytes = summary.bytes;
  const bool fresh = !channels_.contains(identity.channel);
  if (fresh) TB_RETURN_IF_ERROR(MakeRoomForChannel());
  Channel& channel = channels_[identity.channel];
  channel.name = identity.channel;
  channel.used = executor_.Now();
  // It may have been here before.
  if (fresh) channel.epoch = forgotten_epoch_;
  TB_RETURN_IF_ERROR(identity.role == Role::kProducer
                         ? RegisterProducer(agent, channel, std::move(rank), message)
                         : RegisterConsumer(channel, std::move(rank), message));
  agent.ranks.insert(KeyOf(identity));
  return {};
}

// A daemon that starts knows no epoch, and agents refuse those below what they have heard of. What
// began in this life is newer than anything an agent remembers from another.
Result<ChannelEpoch> Core::RaisedEpoch(const Channel& channel,
                                       const proto::RegisterRank& message) const {
  const std::uint64_t heard = std::max(message.known_epoch(), message.seen_epoch());
  if (heard > rpc::kMaxChannelEpoch) {
    return Status(Code::kInvalidArgument,
                  fmt::format("a rank of channel {} registered with epoch {}", channel.name, heard),
                  Reason::kMalformed);
  }
  if (heard <= channel.epoch.value) return channel.epoch;
  return ChannelEpoch{heard + (channel.producer.fresh ? 1 : 0)};
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
  if (static_cast<std::size_t>(message.held_size()) > kMaxKeptVersions) {
    return {Code::kInvalidArgument,
            fmt::format("{} came back with {} versions", who, message.held_size()),
            Reason::kMalformed};
  }

  TB_ASSIGN_OR_RETURN(const ChannelEpoch epoch, RaisedEpoch(channel, message));
  const ProcessMark mark{.host = agent.host, .pid = rank.pid, .layout_hash = rank.layout_hash};
  const bool same_job = producer.job == identity.job && producer.rank_count == identity.rank_count;
  const auto marked = producer.marks.find(identity.rank);
  const bool used = same_job && marked != producer.marks.end();
  const bool same_process = used && rank.pid != 0 && marked->second == mark;
  const std::uint64_t known = message.known_epoch();
  const bool same_epoch =
      known != 0 && known == epoch.value && (same_job || producer.ranks.empty());
  const bool came_back = same_epoch || same_process;
  if (known != 0 && !came_back) {
    return {Code::kFailedPrecondition,
            fmt::format("{} belongs to epoch {} of channel {}, which is over (now {}); restart all "
                        "ranks of the job",
                        who, known, channel.name, epoch.value),
            Reason::kStaleVersion};
  }
  if (!came_back && !same_job && !producer.ranks.empty() &&
      producer.ranks.size() < producer.rank_count && producer.marks.size() < producer.rank_count) {
    return {Code::kInvalidArgument,
            fmt::format("{} says the job has {} ranks, the ranks before it said {}; start all with "
                        "the same number",
                        who, identity.rank_count, producer.rank_count),
            Reason::kLayoutMismatch};
  }
  channel.epoch = epoch;
  if (came_back) {
    if (!same_job) {
      producer = Producer{};
      producer.job = identity.job;
      producer.rank_count = identity.rank_count;
      producer.began = executor_.Now();
    }
    rank.published = Version{message.live_version()};
    if (message.publishing() > message.live_version()) {
      rank.unanswered = Version{message.publishing()};
    }
    channel.newest = std::max(channel.newest, rank.published);
  } else if (!same_job || used || producer.ranks.empty() || OfAnEarlierLife(producer)) {
    BeginGeneration(channel, identity, who + " registered anew");
  }

  producer.ranks.emplace(identity.rank, std::move(rank));
  producer.left.erase(identity.rank);
  producer.marks[identity.rank] = mark;
  // A process that begins once more, without a claim to what it had, begins another run with the
  // others, who hear the same.
  if (known == 0 && !producer.told.insert(identity.rank).second) {
    producer.told = {identity.rank};
    producer.begun_above = channel.newest;
  }
  // Whoever is new has published nothing, so that nothing it says it holds counts.
  TakeBack(channel, identity.rank, message);
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
  producer.began = executor_.Now();
  producer.fresh = true;
  producer.begun_above = channel.newest;
  ++channel.epoch.value;
}

Status Core::RegisterConsumer(Channel& channel, RankState rank,
                              const proto::RegisterRank& message) {
  const RankIdentity identity = rank.identity;
  const std::string who = identity.ToString();
  TB_RETURN_IF_ERROR(RaisedEpoch(channel, message).status());
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

  Replica& replica = channel.replicas[key];
  if (existing == channel.replicas.end()) replica.began = executor_.Now();
  replica.job = identity.job;
  replica.replica = identity.replica;
  replica.rank_count = identity.rank_count;
  replica.ranks.emplace(identity.rank, std::move(rank));
  replica.left.erase(identity.rank);
  return {};
}

void Core::ForgetIfEmpty(const std::string& name) {
  const auto found = channels_.find(name);
  if (found == channels_.end() || !Forgettable(found->second, forgotten_epoch_)) return;
  channels_.erase(found);
}

// Which numbers an empty channel had is remembered as long as there is room: its next producer then
// goes on above them. Of those that are forgotten the greatest epoch is, so that none comes twice.
Status Core::MakeRoomForChannel() {
  if (channels_.size() < kMaxChannels) return {};
  auto oldest = channels_.end();
  for (auto it = channels_.begin(); it != channels_.end(); ++it) {
    const bool older = oldest == channels_.end() || it->second.used < oldest->second.used;
    if (it->second.empty() && older) oldest = it;
  }
  if (oldest == channels_.end()) {
    return {Code::kResourceExhausted,
            fmt::format("this daemon serves {} channels already, all with ranks; stop the jobs of "
                        "one, or start another daemon",
                        channels_.size()),
            Reason::kBusy};
  }
  forgotten_epoch_ = std::max(forgotten_epoch_, oldest->second.epoch);
  Log(LogLevel::kInfo, "channel_forgotten",
      {{"channel", oldest->first}, {"newest", oldest->second.newest.value}});
  channels_.erase(oldest);
  return {};
}

void Core::OnLeave(Agent& agent, const proto::LeaveRank& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  if (!identity.ok()) return;
  const RankKey key = KeyOf(*identity);
  if (const auto pending = registering_.find(key);
      pending != registering_.end() && pending->second.agent == agent.name) {
    side_work_.Cancel(pending->second.ticket);
    registering_.erase(pending);
  }
  if (FindOwn(agent, *identity) == nullptr) return;
  agent.ranks.erase(key);
  const std::string why = message.why().empty()
                              ? (message.on_purpose() ? "it left on purpose" : "it went away")
                              : message.why();
  RankGone(key, Status(Code::kUnavailable, why, Reason::kPeerLost), message.returns());
  UpdateGauges();
}

void Core::RankGone(const RankKey& key, const Status& why, bool may_return) {
  RankState* rank = FindRank(key);
  if (rank == nullptr) return;
  const Status named(why.code(),
                     fmt::format("{} was lost: {}", rank->identity.ToString(), why.message()),
                     why.reason(), why.native());
  Log(LogLevel::kInfo, "rank_left", {{"rank", rank->identity.ToString()}, {"why", why.message()}});
  Channel& channel = channels_.at(key.channel);
  channel.used = executor_.Now();
  AbortSessionsOf(key, named);
  ReconcileLater(channel.name);
  if (key.role == Role::kProducer) {
    channel.producer.left[key.rank] = DepartureOf(why);
    return ProducerRankGone(channel, key.rank, named, may_return);
  }
  Replica& replica = channel.replicas.at({key.job, key.replica});
  if (rank->request) executor_.CancelTimer(rank->request->timer);
  replica.ranks.erase(key.rank);
  replica.left[key.rank] = DepartureOf(why);
  replica.layout.reset();
  replica.assembly = 0;
  if (!replica.ranks.empty()) return;
  channel.replicas.erase({key.job, key.replica});
  // Its name may have been a mistake: without a producer nothing else is known of such a channel.
  ForgetIfEmpty(key.channel);
}

Departure Core::DepartureOf(const Status& why) const {
  return {.when = executor_.Now(), .why = Shortened(why.message(), kMaxWhyBytes)};
}

void Core::ProducerRankGone(Channel& channel, std::uint32_t rank, const Status& why,
                            bool may_return) {
  // Without one of its sources no version can be served; nobody reads the others' memory now.
  for (auto& [number, version] : channel.versions) {
    if (const auto wait = version.waits.find(rank); wait != version.waits.end()) {
      executor_.CancelTimer(wait->second.timer);
      version.waits.erase(wait);
    }
  }
  if (may_return) {
    Suspend(channel, rank);
  } else {
    while (!channel.versions.empty()) Retire(channel, channel.versions.begin()->first);
  }
  channel.producer.ranks.erase(rank);
  channel.producer.layout.reset();
  channel.producer.assembly = 0;
  Log(LogLevel::kWarn, "producer_incomplete", {{"channel", channel.name}, {"error", why}});
}

}  // namespace tensorbus::daemon
