#include "agent/session_table.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>

#include "tensorbus/base/log.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::agent {
namespace {

constexpr std::uint64_t kSessionTimeoutMsMax = 24ULL * 3600 * 1000;
constexpr std::size_t kParticipantsMax = 65536;

Status Malformed(std::string_view what) {
  return {Code::kInvalidArgument, fmt::format("prepare: {}", what), Reason::kMalformed};
}

Status CheckRanks(const std::vector<SessionParticipant>& participants) {
  std::set<std::uint32_t> sources;
  std::set<std::uint32_t> targets;
  for (const SessionParticipant& participant : participants) {
    for (const std::uint32_t rank : participant.source_ranks) {
      if (rank >= kMaxRanks || !sources.insert(rank).second) return Malformed("source ranks");
    }
    for (const std::uint32_t rank : participant.target_ranks) {
      if (rank >= kMaxRanks || !targets.insert(rank).second) return Malformed("target ranks");
    }
  }
  return {};
}

}  // namespace

Result<SessionSpec> ParsePrepare(const proto::Prepare& message) {
  SessionSpec spec;
  spec.id = SessionId{message.session()};
  spec.channel = message.channel();
  spec.epoch = ChannelEpoch{message.channel_epoch()};
  if (spec.epoch == ChannelEpoch{}) return Malformed("no channel epoch");
  if (spec.epoch.value > rpc::kMaxChannelEpoch) return Malformed("a channel epoch beyond 2^62");
  spec.version = Version{message.version()};
  spec.source_job = message.source_job();
  spec.target_job = message.target_job();
  spec.replica = message.replica();
  spec.source_layout = rpc::FromProto(message.source_layout());
  spec.target_layout = rpc::FromProto(message.target_layout());
  if (message.participants_size() > static_cast<int>(kParticipantsMax)) {
    return Malformed("too many participants");
  }
  for (const proto::Participant& in : message.participants()) {
    SessionParticipant participant;
    participant.agent = in.agent();
    participant.host = in.host();
    participant.endpoints.assign(in.endpoints().begin(), in.endpoints().end());
    participant.source_ranks.assign(in.source_ranks().begin(), in.source_ranks().end());
    participant.target_ranks.assign(in.target_ranks().begin(), in.target_ranks().end());
    spec.participants.push_back(std::move(participant));
  }
  TB_RETURN_IF_ERROR(CheckRanks(spec.participants));
  if (message.flip() < 1 || message.flip() > 2) return Malformed("flip mode");
  if (message.proof() < 1 || message.proof() > 4) return Malformed("proof");
  spec.flip = static_cast<FlipMode>(message.flip());
  spec.proof = static_cast<Proof>(message.proof());
  spec.from_snapshot = message.from_snapshot();
  if (message.timeout_ms() == 0) return Malformed("no timeout");
  spec.timeout = std::chrono::milliseconds(std::min(message.timeout_ms(), kSessionTimeoutMsMax));
  spec.plan_digest = rpc::FromProto(message.plan_digest());
  spec.go = message.go();
  Result<transport::Capability> capability = transport::Capability::FromBytes(message.capability());
  if (!capability.ok()) return capability.status().Annotate("prepare");
  spec.capability = *std::move(capability);
  return spec;
}

void SessionTable::OnPrepare(const proto::Prepare& message) {
  Sweep();
  Result<SessionSpec> spec = ParsePrepare(message);
  Status refused = spec.status();
  if (spec.ok() && sessions_.contains(spec->id)) {
    refused =
        Status(Code::kAlreadyExists, fmt::format("session {} was prepared before", spec->id.value));
  } else if (spec.ok() && sessions_.size() >= kSessionCountMax) {
    refused = Status(Code::kResourceExhausted,
                     fmt::format("this agent is in {} sessions already", sessions_.size()),
                     Reason::kBusy);
  } else if (spec.ok()) {
    refused = host_.epochs().Accept(spec->channel, spec->epoch);
  }
  if (!refused.ok()) {
    Log(LogLevel::kWarn, "session_refused", {{"session", message.session()}, {"error", refused}});
    proto::AgentMessage answer;
    answer.mutable_session_failed()->set_session(message.session());
    *answer.mutable_session_failed()->mutable_error() = rpc::ToProto(refused);
    return host_.Send(std::move(answer));
  }
  const SessionId id = spec->id;
  auto session = std::make_shared<Session>(*std::move(spec), host_);
  sessions_.emplace(id, session);
  session->Prepare();
}

void SessionTable::OnGo(SessionId id) {
  if (const auto session = Find(id)) session->Go();
}

void SessionTable::OnFinish(SessionId id) {
  if (const auto session = Find(id)) session->Finish();
}

void SessionTable::OnFlipPrepare(SessionId id) {
  if (const auto session = Find(id)) session->FlipPrepare();
}

void SessionTable::OnFlipCommit(SessionId id) {
  if (const auto session = Find(id)) session->FlipCommit();
}

void SessionTable::OnAbort(SessionId id, const Status& why) {
  if (const auto session = Find(id)) session->Abort(why);
  Sweep();
}

void SessionTable::OnEnded(SessionId id, double seconds) {
  if (const auto session = Find(id)) session->Ended(seconds);
  Sweep();
}

void SessionTable::OnRankLeft(const Rank& rank, const std::string& why) {
  for (const auto& [id, session] : std::map(sessions_)) session->RankLeft(rank, why);
}

void SessionTable::OnDaemonLost(const Status& why) {
  for (const auto& [id, session] : std::map(sessions_)) session->DaemonLost(why);
  Sweep();
}

void SessionTable::Shutdown() {
  for (const auto& [id, session] : sessions_) session->Shutdown();
  sessions_.clear();
}

std::shared_ptr<Session> SessionTable::Find(SessionId id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second;
}

void SessionTable::Sweep() {
  std::erase_if(sessions_, [](const auto& entry) { return entry.second->over(); });
}

}  // namespace tensorbus::agent
