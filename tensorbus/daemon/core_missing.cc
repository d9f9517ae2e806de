#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/version_policy.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

namespace {

/// Why a rank is not there, and since when.
struct Absence {
  std::string why;
  std::string remedy;
  TimePoint since;
};

std::string Ago(TimePoint when, TimePoint now) {
  return fmt::format("{:.1f} s ago", Seconds(now - when));
}

/// Of a rank of a job whose first rank came at `began`.
Absence AbsenceOf(const Departures& left, TimePoint began, std::uint32_t rank, TimePoint now) {
  const auto gone = left.find(rank);
  if (gone == left.end()) return {"has not registered yet", "start it, or look at its log", began};
  return {fmt::format("left {} ({})", Ago(gone->second.when, now), gone->second.why),
          "start it again, or look at its log", gone->second.when};
}

}  // namespace

std::vector<Core::Missing> Core::AbsentProducerRanks(const Channel& channel) const {
  std::vector<Missing> out;
  const Producer& producer = channel.producer;
  const std::string what = fmt::format("channel {} waits for its producer", channel.name);
  for (std::uint32_t rank = 0; rank < producer.rank_count; ++rank) {
    if (producer.ranks.contains(rank)) continue;
    if (out.size() >= kMaxListedFaults) break;
    Absence absence = AbsenceOf(producer.left, producer.began, rank, executor_.Now());
    out.push_back({what, ProducerRankName(channel, rank), std::move(absence.why),
                   std::move(absence.remedy), absence.since});
  }
  return out;
}

std::string Core::WhyIncomplete(const Channel& channel) const {
  constexpr std::size_t kNamedRanks = 4;
  const Producer& producer = channel.producer;
  if (producer.job.empty()) return "no producer has registered yet";
  const std::size_t absent = producer.rank_count - producer.ranks.size();
  if (absent == 0) return fmt::format("the layout of job {} is being put together", producer.job);
  if (producer.left.size() == producer.rank_count && producer.rank_count > 1) {
    const auto last = std::max_element(
        producer.left.begin(), producer.left.end(),
        [](const auto& a, const auto& b) { return a.second.when < b.second.when; });
    return fmt::format("all {} ranks of {}/{} left, the last {} ({})", producer.rank_count,
                       channel.name, producer.job, Ago(last->second.when, executor_.Now()),
                       last->second.why);
  }
  std::string out;
  const std::vector<Missing> ranks = AbsentProducerRanks(channel);
  for (std::size_t i = 0; i < std::min(ranks.size(), kNamedRanks); ++i) {
    out += fmt::format("{}{} {}", i == 0 ? "" : ", ", ranks[i].who, ranks[i].why);
  }
  if (absent > kNamedRanks) out += fmt::format(", and {} more", absent - kNamedRanks);
  return out;
}

std::vector<Core::Missing> Core::MissingOf(const Channel& channel, const Replica& replica) const {
  std::vector<Missing> out;
  const TimePoint now = executor_.Now();
  const bool asks = std::any_of(replica.ranks.begin(), replica.ranks.end(),
                                [](const auto& entry) { return entry.second.request.has_value(); });
  const std::string what =
      ReplicaName(channel, replica) + (asks ? " waits for a version" : " waits for its ranks");
  TimePoint since = now;
  for (const auto& [number, rank] : replica.ranks) {
    if (rank.request) since = std::min(since, rank.request->since);
  }
  const auto add = [&](std::string who, std::string why, std::string remedy) {
    if (out.size() >= kMaxListedFaults) return;
    out.push_back({what, std::move(who), std::move(why), std::move(remedy), since});
  };
  for (std::uint32_t number = 0; number < replica.rank_count; ++number) {
    const auto rank = replica.ranks.find(number);
    if (rank == replica.ranks.end()) {
      Absence absence = AbsenceOf(replica.left, replica.began, number, now);
      if (!asks) since = absence.since;
      add(ReplicaRankName(channel, replica, number), std::move(absence.why),
          std::move(absence.remedy));
    } else if (asks && !rank->second.request) {
      add(ReplicaRankName(channel, replica, number), "has not asked for a version",
          "every rank of a replica must ask; is it stuck or behind?");
    }
  }
  if (!out.empty() || !asks) return out;

  if (replica.assembly != 0) {
    add(ReplicaName(channel, replica), "is still being compared with what the producer publishes",
        "give it more time");
    return out;
  }
  const Producer& producer = channel.producer;
  constexpr std::string_view kUnchecked =
      "; this replica's layout is compared with the producer's once it is there";
  if (producer.job.empty()) {
    add(fmt::format("a producer of channel {}", channel.name), "has not registered yet",
        fmt::format("start the trainer, or check the channel's name{}", kUnchecked));
    return out;
  }
  for (Missing& rank : AbsentProducerRanks(channel)) {
    if (out.empty() && replica.live().value == 0) rank.remedy += kUnchecked;
    add(std::move(rank.who), std::move(rank.why), std::move(rank.remedy));
  }
  if (!out.empty()) return out;
  for (const auto& [version, state] : channel.versions) {
    if (state.readable) continue;
    for (std::uint32_t number = 0; number < producer.rank_count; ++number) {
      if (state.published.contains(number)) continue;
      add(ProducerRankName(channel, number),
          fmt::format("has not published version {}", version.value),
          "all ranks of the job must publish it");
    }
    return out;
  }
  if (channel.newest > replica.live() && channel.versions.empty()) {
    add(fmt::format("{}/{}", channel.name, producer.job),
        fmt::format("took the memory of version {}, its newest, back before this replica had it",
                    channel.newest.value),
        "wait for its next step; with the policy wait or snapshot it keeps a version for engines "
        "that are there");
    return out;
  }
  add(fmt::format("{}/{}", channel.name, producer.job),
      fmt::format("has published nothing newer than version {}", channel.newest.value),
      "wait for its next step, or give more time");
  return out;
}

std::vector<Core::Missing> Core::MissingOf(const Channel& channel,
                                           const VersionState& version) const {
  std::vector<Missing> out;
  for (const auto& [rank, wait] : version.waits) {
    const std::string what = fmt::format("{} waits to write the memory of version {}",
                                         ProducerRankName(channel, rank), version.version.value);
    for (const std::string& holder : HoldersOf(channel, version)) {
      out.push_back({what, holder, "",
                     version.readable ? "let it ask for a version and wait for it, or publish with "
                                        "the policy skip"
                                      : "all ranks of the job must publish it",
                     wait.since});
    }
  }
  return out;
}

std::string Core::WhoHoldsUp(const Channel& channel, const Replica& replica) const {
  std::vector<std::string> who;
  for (const Missing& missing : MissingOf(channel, replica)) {
    who.push_back(fmt::format("{} {}; {}", missing.who, missing.why, missing.remedy));
  }
  if (who.empty()) return "no fitting version became readable";
  return fmt::format("{}", fmt::join(who, "; "));
}

Status Core::StillWaiting(const RankState& rank, const std::string& who) const {
  const Request& wish = *rank.request;
  const std::string what = wish.selector == Selector::kPinned
                               ? fmt::format("version {}", wish.version.value)
                               : fmt::format("the {} version", SelectorName(wish.selector));
  return {Code::kDeadlineExceeded,
          fmt::format("{} waited {:.1f} s for {}: {}", rank.identity.ToString(),
                      Seconds(executor_.Now() - wish.since), what, who),
          Reason::kMissingRank};
}

Status Core::NotReleased(const Channel& channel, const VersionState& version,
                         std::uint32_t rank) const {
  std::vector<std::string> who = HoldersOf(channel, version);
  for (const auto& [id, running] : sessions_) {
    const Session::Config& config = running.session.config();
    if (config.channel != channel.name || config.version != version.version) continue;
    for (std::string& missing : running.session.Missing()) who.push_back(std::move(missing));
  }
  if (who.empty() && AwaitsReturns(version)) {
    who.emplace_back("replicas that were there before this daemon started may want it");
  }
  if (who.empty()) who.emplace_back("somebody reads it");
  return {Code::kDeadlineExceeded,
          fmt::format("{} waited {:.1f} s to write the memory of version {}: {}; give it more "
                      "time, or publish with the policy skip or snapshot",
                      ProducerRankName(channel, rank),
                      Seconds(executor_.Now() - version.waits.at(rank).since),
                      version.version.value, fmt::join(who, "; ")),
          Reason::kMissingRank};
}

// The answer may cross the end of what was asked about: then nobody looks at it.
Status Core::WaitsFor(const RankIdentity& identity, Version version) const {
  const Status nothing(Code::kDeadlineExceeded,
                       identity.ToString() + " waits for nothing at the daemon", Reason::kBusy);
  const auto channel = channels_.find(identity.channel);
  if (channel == channels_.end()) return nothing;
  if (identity.role == Role::kProducer) {
    const auto held = channel->second.versions.find(version);
    const bool waits =
        held != channel->second.versions.end() && held->second.waits.contains(identity.rank);
    return waits ? NotReleased(channel->second, held->second, identity.rank) : nothing;
  }
  const auto found = channel->second.replicas.find({identity.job, identity.replica});
  if (found == channel->second.replicas.end()) return nothing;
  const Replica& replica = found->second;
  const auto rank = replica.ranks.find(identity.rank);
  if (rank == replica.ranks.end() || !rank->second.request) return nothing;
  const auto running = sessions_.find(replica.session);
  if (running == sessions_.end()) {
    return StillWaiting(rank->second, WhoHoldsUp(channel->second, replica));
  }
  const Session& session = running->second.session;
  return StillWaiting(
      rank->second,
      fmt::format("session {} is {} version {}; it waits for {}", session.config().id.value,
                  StateName(session.state()), session.config().version.value,
                  fmt::join(session.Missing(), "; ")));
}

void Core::OnExplainWait(Agent& agent, const proto::ExplainWait& message) {
  const Result<RankIdentity> identity = rpc::FromProto(message.rank());
  if (!identity.ok() || FindOwn(agent, *identity) == nullptr) return;
  proto::WaitExplained reply;
  reply.set_request(message.request());
  *reply.mutable_rank() = message.rank();
  *reply.mutable_error() = rpc::ToProto(WaitsFor(*identity, Version{message.version()}));
  SendTo(agent.name, Wrap(&proto::DaemonMessage::mutable_wait_explained, std::move(reply)));
}

void Core::WhoIsMissing(const proto::WhoIsMissingRequest&, Done<proto::WhoIsMissingReply> done) {
  proto::WhoIsMissingReply reply;
  const TimePoint now = executor_.Now();
  const auto add = [&](const Missing& missing) {
    if (static_cast<std::size_t>(reply.missing_size()) >= kMaxListedFaults * 8) return;
    proto::MissingStatus& out = *reply.add_missing();
    out.set_what(missing.what);
    out.set_who(missing.why.empty() ? missing.who : fmt::format("{} {}", missing.who, missing.why));
    out.set_waiting_seconds(Seconds(now - missing.since));
    out.set_remedy(missing.remedy);
  };
  for (const auto& [name, channel] : channels_) {
    for (const auto& [key, replica] : channel.replicas) {
      const bool waits =
          !replica.complete() ||
          std::any_of(replica.ranks.begin(), replica.ranks.end(),
                      [](const auto& entry) { return entry.second.request.has_value(); });
      if (!waits || replica.session.value != 0) continue;
      for (const Missing& missing : MissingOf(channel, replica)) add(missing);
    }
    for (const auto& [number, version] : channel.versions) {
      for (const Missing& missing : MissingOf(channel, version)) add(missing);
    }
    for (const Missing& missing : AbsentProducerRanks(channel)) add(missing);
  }
  for (const auto& [id, running] : sessions_) {
    for (const std::string& who : running.session.Missing()) {
      add({fmt::format("session {} is {}", id.value, StateName(running.session.state())), who, "",
           "look at that agent's log; a worker answers only while it waits for its request, or "
           "with start_service()",
           running.phase_since});
    }
  }
  done(std::move(reply));
}

}  // namespace tensorbus::daemon
