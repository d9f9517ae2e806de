#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tensorbus/daemon/core.h"
#include "tensorbus/daemon/version_policy.h"

namespace tensorbus::daemon {

std::vector<Core::Missing> Core::MissingOf(const Channel& channel, const Replica& replica) const {
  std::vector<Missing> out;
  const std::string what = ReplicaName(channel, replica) + " waits for a version";
  TimePoint since = executor_.Now();
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
      add(ReplicaRankName(channel, replica, number), "has not registered",
          "start it, or look at its log");
    } else if (!rank->second.request) {
      add(ReplicaRankName(channel, replica, number), "has not asked for a version",
          "every rank of a replica must ask; is it stuck or behind?");
    }
  }
  if (!out.empty()) return out;

  const Producer& producer = channel.producer;
  if (producer.job.empty()) {
    add(fmt::format("a producer of channel {}", channel.name), "has not registered",
        "start the trainer, or check the channel's name");
    return out;
  }
  for (std::uint32_t number = 0; number < producer.rank_count; ++number) {
    if (producer.ranks.contains(number)) continue;
    add(ProducerRankName(channel, number), "has not registered", "start it, or look at its log");
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
                     version.readable ? "let it ask for a version, or publish with the policy skip"
                                      : "all ranks of the job must publish it",
                     wait.since});
    }
  }
  return out;
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
    if (!channel.producer.job.empty() && !channel.producer.complete()) {
      for (std::uint32_t rank = 0; rank < channel.producer.rank_count; ++rank) {
        if (channel.producer.ranks.contains(rank)) continue;
        add({fmt::format("channel {} waits for its producer", name),
             ProducerRankName(channel, rank), "has not registered", "start it, or look at its log",
             now});
      }
    }
  }
  for (const auto& [id, running] : sessions_) {
    for (const std::string& who : running.session.Missing()) {
      add({fmt::format("session {} is {}", id.value, StateName(running.session.state())), who, "",
           "look at that agent's log and at `tensorbusctl status`", running.phase_since});
    }
  }
  done(std::move(reply));
}

}  // namespace tensorbus::daemon
