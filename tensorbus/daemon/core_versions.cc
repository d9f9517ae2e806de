#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tensorbus/base/log.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/version_policy.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

constexpr Nanos kLongestTimeout = std::chrono::hours(24);

/// What a rank asks for with a publish, or asked for with that of a version it holds.
template <typename Message>
Result<VersionState> WishOf(const RankIdentity& identity, const Message& message, TimePoint now) {
  if (message.policy() < 1 || message.policy() > 3 || message.keep_last() > kMaxKeptVersions / 2) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} published with an unknown policy, or keep_last above {}",
                              identity.ToString(), kMaxKeptVersions / 2),
                  Reason::kMalformed);
  }
  VersionState wish;
  wish.version = Version{message.version()};
  wish.policy = static_cast<SlowConsumer>(message.policy());
  wish.min_replicas = message.min_replicas();
  wish.keep_last = message.keep_last();
  wish.since = now;
  return wish;
}

}  // namespace

Nanos TimeoutOf(std::uint64_t timeout_ms, Nanos otherwise) {
  if (timeout_ms == 0) return otherwise;
  const auto bound = std::chrono::duration_cast<std::chrono::milliseconds>(kLongestTimeout);
  if (timeout_ms > static_cast<std::uint64_t>(bound.count())) return kLongestTimeout;
  return std::chrono::milliseconds(timeout_ms);
}

void Core::OnPublish(Agent& agent, const proto::Publish& message) {
  proto::PublishAccepted reply;
  reply.set_request(message.request());
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  const Status status = identity.ok() ? Publish(agent, *identity, message) : identity.status();
  if (status.ok()) {
    metrics_.publishes_accepted.Increment();
  } else {
    metrics_.publishes_refused.Increment();
    Log(LogLevel::kWarn, "publish_refused", {{"agent", agent.name}, {"error", status}});
    *reply.mutable_error() = rpc::ToProto(status);
  }
  SendTo(agent.name, Wrap(&proto::DaemonMessage::mutable_publish_accepted, std::move(reply)));
  if (status.ok() && message.policy() == static_cast<std::uint32_t>(SlowConsumer::kSnapshot)) {
    AnswerRelease(channels_.at(identity->channel), identity->rank, Version{message.version()}, {});
  }
}

Status Core::Publish(Agent& agent, const RankIdentity& identity, const proto::Publish& message) {
  RankState* rank = FindOwn(agent, identity);
  if (rank == nullptr || identity.role != Role::kProducer) {
    return {Code::kFailedPrecondition,
            fmt::format("{} is not registered as a producer of the channel's current epoch; "
                        "register it again with the whole job",
                        identity.ToString()),
            Reason::kStaleVersion};
  }
  TB_ASSIGN_OR_RETURN(const VersionState wish, WishOf(identity, message, executor_.Now()));
  if (wish.snapshot() && !message.snapshot_made()) {
    return {Code::kFailedPrecondition,
            fmt::format("{} asked for a snapshot of version {} but its agent made none",
                        identity.ToString(), message.version())};
  }
  Channel& channel = channels_.at(identity.channel);
  const auto previous = channel.versions.find(rank->published);
  const bool previous_is_read = previous != channel.versions.end() &&
                                !previous->second.snapshot() &&
                                SessionsReading(channel, rank->published) > 0;
  TB_RETURN_IF_ERROR(CheckPublish(channel, *rank, wish, previous_is_read));

  // The rank's memory holds the new version now: what it held before can be served no longer, and
  // what it never published never becomes readable.
  std::vector<Version> over;
  for (const auto& [number, version] : channel.versions) {
    if (number >= wish.version) break;
    const bool had = version.published.contains(identity.rank);
    if (had ? !version.snapshot() : !version.readable) over.push_back(number);
  }
  for (const Version number : over) Retire(channel, number);

  VersionState& version = channel.versions.try_emplace(wish.version, wish).first->second;
  version.published.insert(identity.rank);
  rank->published = wish.version;
  rank->unanswered = {};
  channel.newest = std::max(channel.newest, wish.version);
  // A rollback lasts until something newer was published.
  if (version.published.size() == channel.producer.rank_count && channel.rollback < wish.version) {
    channel.rollback = {};
  }
  ShowReadable(channel);
  ReconcileLater(channel.name);
  return {};
}

void Core::ShowReadable(Channel& channel) {
  if (!channel.producer.complete()) return;
  for (auto& [number, version] : channel.versions) {
    if (version.readable || version.published.size() < channel.producer.rank_count) continue;
    version.readable = true;
    Log(LogLevel::kInfo, "version_readable",
        {{"channel", channel.name}, {"version", number.value}, {"held_over", version.held_over}});
  }
}

void Core::TakeBack(Channel& channel, std::uint32_t number, const proto::RegisterRank& message) {
  const RankState& rank = channel.producer.ranks.at(number);
  for (const proto::HeldVersion& held : message.held()) {
    Result<VersionState> wish = WishOf(rank.identity, held, executor_.Now());
    const Status status = wish.ok() ? CheckHeld(channel, rank, *wish) : wish.status();
    if (!status.ok()) {
      Log(LogLevel::kWarn, "held_version_refused",
          {{"rank", rank.identity.ToString()}, {"error", status}});
      DropSnapshot(rank, Version{held.version()});
      continue;
    }
    wish->held_over = !channel.producer.fresh;
    VersionState& version = channel.versions.try_emplace(wish->version, *wish).first->second;
    version.published.insert(number);
    const auto gone = std::find_if(
        channel.released.begin(), channel.released.end(),
        [&](const ReleasedVersion& released) { return released.version == version.version; });
    if (gone == channel.released.end()) continue;
    version.taken = std::move(gone->taken);
    channel.released.erase(gone);
  }
  for (const Version lost : LostVersions(channel)) Retire(channel, lost);
  if (message.held_size() != 0 && executor_.Now() < started_ + options_.return_time) {
    executor_.PostAt(started_ + options_.return_time,
                     [this, name = channel.name] { ReconcileLater(name); });
  }
}

void Core::Suspend(Channel& channel, std::uint32_t rank) {
  std::vector<Version> over;
  for (auto& [number, version] : channel.versions) {
    version.published.erase(rank);
    version.readable = false;
    // What was about to be given back is not waited for, nor what nobody here holds.
    if (version.closing || version.published.empty()) over.push_back(number);
  }
  const Version rollback = channel.rollback;
  for (const Version number : over) Retire(channel, number);
  channel.rollback = rollback;  // the version may come back with its ranks
}

bool Core::AwaitsReturns(const VersionState& version) const {
  return version.held_over && version.policy == SlowConsumer::kWait &&
         executor_.Now() < started_ + options_.return_time;
}

void Core::OnRequestRelease(Agent& agent, const proto::RequestRelease& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  if (!identity.ok()) return;
  const Version number{message.version()};
  const auto answer = [&](const Status& status) {
    proto::VersionReleased reply;
    *reply.mutable_rank() = message.rank();
    reply.set_version(number.value);
    if (!status.ok()) *reply.mutable_error() = rpc::ToProto(status);
    SendTo(agent.name, Wrap(&proto::DaemonMessage::mutable_version_released, std::move(reply)));
  };
  const auto found = channels_.find(identity->channel);
  if (FindOwn(agent, *identity) == nullptr || found == channels_.end()) return answer({});
  Channel& channel = found->second;
  if (number > channel.newest) {
    return answer(
        Status(Code::kNotFound,
               fmt::format("{} asks for the release of version {}, which nobody published",
                           identity->ToString(), number.value)));
  }
  const auto version = channel.versions.find(number);
  if (version == channel.versions.end() || version->second.snapshot() ||
      !version->second.published.contains(identity->rank)) {
    return answer({});
  }
  ReleaseWait& wait = version->second.waits[identity->rank];
  if (wait.timer != 0) executor_.CancelTimer(wait.timer);
  wait.since = executor_.Now();
  wait.timer = executor_.PostAfter(TimeoutOf(message.timeout_ms(), options_.default_timeout),
                                   [this, name = channel.name, number, rank = identity->rank] {
                                     ReleaseTimedOut(name, number, rank);
                                   });
  ReconcileLater(channel.name);
}

void Core::ReleaseTimedOut(const std::string& name, Version number, std::uint32_t rank) {
  const auto found = channels_.find(name);
  if (found == channels_.end()) return;
  Channel& channel = found->second;
  const auto version = channel.versions.find(number);
  if (version == channel.versions.end()) return;
  const auto wait = version->second.waits.find(rank);
  if (wait == version->second.waits.end()) return;
  const Status status = NotReleased(channel, version->second, rank);
  metrics_.release_wait_seconds.Observe(Seconds(executor_.Now() - wait->second.since));
  version->second.waits.erase(wait);
  Log(LogLevel::kWarn, "release_timed_out", {{"error", status}});
  AnswerRelease(channel, rank, number, status);
}

void Core::TryRelease(Channel& channel, VersionState& version, std::vector<Version>& gone) {
  if (version.waits.empty() || AwaitsReturns(version)) return;
  switch (DecideRelease(channel, version, SessionsReading(channel, version.version))) {
    case Release::kHold:
      return;
    case Release::kClose:
      version.closing = true;
      return;
    case Release::kGrant:
      gone.push_back(version.version);
      return;
  }
}

void Core::AnswerRelease(Channel& channel, std::uint32_t rank, Version version,
                         const Status& status) {
  const auto found = channel.producer.ranks.find(rank);
  if (found == channel.producer.ranks.end()) return;
  proto::VersionReleased reply;
  *reply.mutable_rank() = rpc::ToProto(found->second.identity);
  reply.set_version(version.value);
  if (!status.ok()) *reply.mutable_error() = rpc::ToProto(status);
  SendTo(found->second.agent,
         Wrap(&proto::DaemonMessage::mutable_version_released, std::move(reply)));
}

void Core::Retire(Channel& channel, Version number) {
  auto node = channel.versions.extract(number);
  if (node.empty()) return;
  const VersionState& version = node.mapped();
  for (const auto& [rank, wait] : version.waits) {
    executor_.CancelTimer(wait.timer);
    metrics_.release_wait_seconds.Observe(Seconds(executor_.Now() - wait.since));
    AnswerRelease(channel, rank, number, {});
  }
  if (version.snapshot()) {
    for (const std::uint32_t rank : version.published) {
      const auto found = channel.producer.ranks.find(rank);
      if (found != channel.producer.ranks.end()) DropSnapshot(found->second, number);
    }
  }
  if (channel.rollback == number) channel.rollback = {};
  channel.released.push_back(
      {.version = number,
       .taken = version.taken,
       .snapshot = version.snapshot(),
       .published_ranks = static_cast<std::uint32_t>(version.published.size()),
       .since = version.since});
  if (channel.released.size() > kMaxReleasedVersions) channel.released.pop_front();
  ReconcileLater(channel.name);
}

void Core::DropSnapshot(const RankState& rank, Version version) {
  proto::DropSnapshot drop;
  *drop.mutable_rank() = rpc::ToProto(rank.identity);
  drop.set_version(version.value);
  SendTo(rank.agent, Wrap(&proto::DaemonMessage::mutable_drop_snapshot, std::move(drop)));
}

void Core::DropSnapshots(Channel& channel) {
  for (const Version version : SnapshotsToDrop(channel)) {
    if (SessionsReading(channel, version) == 0) Retire(channel, version);
  }
}

std::size_t Core::SessionsReading(const Channel& channel, Version version) const {
  std::size_t count = 0;
  for (const auto& [id, running] : sessions_) {
    const Session::Config& config = running.session.config();
    // Once the sources have finished, nobody reads their memory any more.
    if (config.channel == channel.name && config.version == version &&
        running.session.state() < Session::State::kFlipping) {
      ++count;
    }
  }
  return count;
}

}  // namespace tensorbus::daemon
