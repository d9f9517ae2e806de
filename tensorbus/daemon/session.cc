#include "tensorbus/daemon/session.h"

#include <algorithm>
#include <fmt/format.h>
#include <span>

#include "tensorbus/base/malformed.h"
#include "tensorbus/rpc/convert.h"

namespace tensorbus::daemon {

namespace {

std::string ToText(const DigestSum& sum) {
  return fmt::format("{:016x}{:016x} over {} bytes", sum.b, sum.a, sum.bytes);
}

Status Mismatch(std::string message) {
  return {Code::kDataLoss, std::move(message), Reason::kChecksumMismatch};
}

/// What a rank holds of a tensor.
std::span<const Box> BoxesOf(const JobLayout& layout, const std::string& name, std::uint32_t rank) {
  for (const JobLayout::Tensor& tensor : layout.tensors) {
    if (tensor.spec.name != name) continue;
    for (const RankBoxes& held : layout.HoldingOf(tensor).ranks) {
      if (held.rank == rank) return held.boxes;
    }
  }
  return {};
}

}  // namespace

std::string_view StateName(Session::State state) {
  switch (state) {
    case Session::State::kPreparing:
      return "preparing";
    case Session::State::kMoving:
      return "moving";
    case Session::State::kFinishing:
      return "finishing";
    case Session::State::kFlipping:
    case Session::State::kCommitting:
      return "flipping";
    case Session::State::kDone:
      return "done";
    case Session::State::kFailed:
      return "failed";
  }
  return "?";
}

Session::Session(Config config) : config_(std::move(config)) {
  if (config_.plan_digest) {
    digest_ = config_.plan_digest;
    digest_agent_ = "an earlier session";
    state_ = State::kMoving;
  }
}

std::string Session::SourceName(std::uint32_t rank) const {
  return RankIdentity{.channel = config_.channel,
                      .job = config_.source_job,
                      .role = Role::kProducer,
                      .replica = 0,
                      .rank = rank,
                      .rank_count = config_.source->layout.rank_count}
      .ToString();
}

std::string Session::TargetName(std::uint32_t rank) const {
  return RankIdentity{.channel = config_.channel,
                      .job = config_.target_job,
                      .role = Role::kConsumer,
                      .replica = config_.replica,
                      .rank = rank,
                      .rank_count = config_.target->layout.rank_count}
      .ToString();
}

const Session::Participant* Session::Find(const std::string& agent) const {
  for (const Participant& participant : config_.participants) {
    if (participant.agent == agent) return &participant;
  }
  return nullptr;
}

proto::Prepare Session::PrepareMessage(Nanos timeout) const {
  proto::Prepare prepare;
  prepare.set_session(config_.id.value);
  prepare.set_channel(config_.channel);
  prepare.set_channel_epoch(config_.epoch.value);
  prepare.set_version(config_.version.value);
  prepare.set_source_job(config_.source_job);
  prepare.set_target_job(config_.target_job);
  prepare.set_replica(config_.replica);
  *prepare.mutable_source_layout() = rpc::ToProto(config_.source->hash);
  *prepare.mutable_target_layout() = rpc::ToProto(config_.target->hash);
  for (const Participant& participant : config_.participants) {
    proto::Participant& out = *prepare.add_participants();
    out.set_agent(participant.agent);
    out.set_host(participant.host);
    for (const std::string& endpoint : participant.endpoints) out.add_endpoints(endpoint);
    for (const std::uint32_t rank : participant.source_ranks) out.add_source_ranks(rank);
    for (const std::uint32_t rank : participant.target_ranks) out.add_target_ranks(rank);
  }
  prepare.set_flip(static_cast<std::uint32_t>(config_.flip));
  prepare.set_proof(static_cast<std::uint32_t>(config_.proof));
  prepare.set_from_snapshot(config_.from_snapshot);
  prepare.set_capability(config_.capability);
  prepare.set_timeout_ms(static_cast<std::uint64_t>(
      std::max<std::int64_t>(1, std::chrono::ceil<std::chrono::milliseconds>(timeout).count())));
  if (config_.plan_digest) {
    *prepare.mutable_plan_digest() = rpc::ToProto(*config_.plan_digest);
    prepare.set_go(true);
  }
  return prepare;
}

Status Session::CheckOwner(const std::string& agent,
                           const std::vector<std::uint32_t> Participant::*ranks, std::uint32_t rank,
                           const char* what) const {
  const Participant* participant = Find(agent);
  if (participant != nullptr &&
      std::binary_search((participant->*ranks).begin(), (participant->*ranks).end(), rank)) {
    return {};
  }
  return Malformed(
      fmt::format("agent {} sent {} of rank {}, which is not its own", agent, what, rank));
}

Status Session::Unexpected(const char* what) const {
  return Malformed(fmt::format("{} came while the session was {}", what, StateName(state_)));
}

Result<Session::Step> Session::OnReady(const std::string& agent, const Hash128& plan_digest) {
  if (Find(agent) == nullptr) {
    return Malformed(fmt::format("agent {} takes no part in the session", agent));
  }
  if (digest_ && *digest_ != plan_digest) {
    return Status(Code::kAborted,
                  fmt::format("agent {} plans {}, {} plans {}; all agents must run the same build",
                              agent, plan_digest.ToHex(), digest_agent_, digest_->ToHex()),
                  Reason::kPlanMismatch);
  }
  if (!digest_) {
    digest_ = plan_digest;
    digest_agent_ = "agent " + agent;
  }
  ready_.insert(agent);
  if (state_ != State::kPreparing || ready_.size() < config_.participants.size()) {
    return Step::kNone;
  }
  state_ = State::kMoving;
  return Step::kGo;
}

Status Session::CheckVersion(const std::string& who, std::uint64_t version,
                             std::uint64_t epoch) const {
  if (version == config_.version.value && epoch == config_.epoch.value) return {};
  return {
      Code::kFailedPrecondition,
      fmt::format("{} has a receipt of version {} in epoch {}, the session brings version {} in "
                  "epoch {}; it ends before its flip, ask for a version again",
                  who, version, epoch, config_.version.value, config_.epoch.value),
      Reason::kStaleVersion};
}

std::string Session::Difference(const BoxSum& a, const BoxSum& b) const {
  const std::vector<JobLayout::Tensor>& tensors = config_.target->layout.tensors;
  const auto count = static_cast<std::uint32_t>(tensors.size());
  const std::int64_t tensor = DifferingTensor(a, b, count);
  if (tensor < 0) return "boxes of several tensors";
  return "boxes of " + tensors[static_cast<std::size_t>(tensor)].spec.name;
}

std::string Session::PartOf(std::size_t tensor, std::uint32_t source, std::uint32_t target) const {
  const std::string& name = config_.target->layout.tensors[tensor].spec.name;
  std::string out = name;
  int count = 0;
  for (const Box& to : BoxesOf(config_.target->layout, name, target)) {
    for (const Box& from : BoxesOf(config_.source->layout, name, source)) {
      const std::optional<Box> both = Intersect(from, to);
      if (both.has_value() && ++count == 1) out += both->ToString();
    }
  }
  return count > 1 ? out + " and more" : out;
}

Status Session::CheckRoute(const proto::RouteReceipt& route) const {
  const std::uint32_t source = route.source_rank();
  const std::uint32_t target = route.target_rank();
  if (source >= config_.source->layout.rank_count) {
    return Malformed(fmt::format("a receipt names source rank {} of {}", source,
                                 config_.source->layout.rank_count));
  }
  const DigestSum sent = rpc::FromProto(route.source());
  const DigestSum held = rpc::FromProto(route.target());
  // Weaker proofs count the target's bytes but need not read them back.
  const bool unread = config_.proof < Proof::kReadback && held.a == 0 && held.b == 0;
  if (unread ? sent.bytes == held.bytes : sent == held) return {};
  return Mismatch(fmt::format("{} sent {}, {} holds {}; the session ends before its flip",
                              SourceName(source), ToText(sent), TargetName(target), ToText(held)));
}

Result<Session::Step> Session::OnReceipt(const std::string& agent,
                                         const proto::SessionReceipt& receipt) {
  const std::uint32_t target = receipt.target_rank();
  TB_RETURN_IF_ERROR(CheckOwner(agent, &Participant::target_ranks, target, "a receipt"));
  if (state_ != State::kMoving) return Unexpected("a receipt");
  TB_RETURN_IF_ERROR(CheckVersion(TargetName(target), receipt.version(), receipt.channel_epoch()));
  if (received_.contains(target)) {
    return Malformed(TargetName(target) + " reported its receipt twice");
  }
  std::uint64_t bytes = 0;
  BoxSum boxes;
  for (const proto::RouteReceipt& route : receipt.routes()) {
    if (route.target_rank() != target) {
      return Malformed(fmt::format("the receipt of {} names target rank {}", TargetName(target),
                                   route.target_rank()));
    }
    TB_RETURN_IF_ERROR(CheckRoute(route));
    const bool first = routes_
                           .emplace(std::pair(route.source_rank(), target),
                                    Route{.source = rpc::FromProto(route.source()),
                                          .target = rpc::FromProto(route.target()),
                                          .boxes = rpc::FromProto(route.boxes()),
                                          .located = route.located()})
                           .second;
    if (!first) {
      return Malformed(fmt::format("the receipt of {} names {} twice", TargetName(target),
                                   SourceName(route.source_rank())));
    }
    bytes += route.target().bytes();
    boxes += rpc::FromProto(route.boxes());
  }
  if (bytes != config_.target->rank_bytes[target]) {
    return Mismatch(fmt::format("{} reports {} bytes, its layout has {}: some route is missing",
                                TargetName(target), bytes, config_.target->rank_bytes[target]));
  }
  if (boxes != config_.target->rank_boxes[target]) {
    return Mismatch(fmt::format("{} has receipts for other {} than its layout asks for",
                                TargetName(target),
                                Difference(boxes, config_.target->rank_boxes[target])));
  }
  bytes_ += bytes;
  received_.insert(target);
  if (received_.size() < config_.target->layout.rank_count) return Step::kNone;
  state_ = State::kFinishing;
  return Step::kFinish;
}

// A route as its source saw it, against what its target reported.
Status Session::CheckCounted(std::uint32_t source, const proto::RouteReceipt& route) const {
  const std::uint32_t target = route.target_rank();
  if (route.source_rank() != source) {
    return Malformed(fmt::format("{} names a route of source rank {}, which is not its own",
                                 SourceName(source), route.source_rank()));
  }
  const auto found = routes_.find({source, target});
  if (found == routes_.end()) {
    return Mismatch(fmt::format("{} counts a route to target rank {} that no target reported",
                                SourceName(source), target));
  }
  const BoxSum boxes = rpc::FromProto(route.boxes());
  if (boxes != found->second.boxes) {
    return Mismatch(fmt::format("{} opened other {} for {} than arrived there", SourceName(source),
                                Difference(boxes, found->second.boxes), TargetName(target)));
  }
  if (!route.has_source()) {
    if (config_.proof != Proof::kStream) return {};
    return Mismatch(
        fmt::format("{} has no receipt of its own for its route to {}, which the proof "
                    "asks for",
                    SourceName(source), TargetName(target)));
  }
  const DigestSum counted = rpc::FromProto(route.source());
  const DigestSum& sent = found->second.source;
  // Without a proof nobody digested what was sent: all there is to compare is how much that was.
  const bool undigested = config_.proof == Proof::kOff;
  if (counted == sent || (undigested && counted.bytes == sent.bytes)) return {};
  if (counted.bytes != sent.bytes) {
    return Mismatch(fmt::format("{} counted {} for {}, which received {}", SourceName(source),
                                ToText(counted), TargetName(target), ToText(sent)));
  }
  // Located as box sums are, so that the same arithmetic finds the tensor.
  const std::int64_t tensor =
      DifferingTensor({.sum = counted.a, .located = route.located()},
                      {.sum = sent.a, .located = found->second.located},
                      static_cast<std::uint32_t>(config_.target->layout.tensors.size()));
  return {
      Code::kFailedPrecondition,
      fmt::format(
          "{} wrote to its memory ({}) after it published version {} and before that was "
          "released: what it sent to {} is not what it counted; call before_write() (or "
          "install the optimizer hook) ahead of every step, or publish with a snapshot",
          SourceName(source),
          tensor < 0 ? "several tensors" : PartOf(static_cast<std::size_t>(tensor), source, target),
          config_.version.value, TargetName(target)),
      Reason::kWriteDuringPublish};
}

Result<Session::Step> Session::OnSourceDone(const std::string& agent,
                                            const proto::SourceDone& done) {
  const std::uint32_t source = done.source_rank();
  TB_RETURN_IF_ERROR(CheckOwner(agent, &Participant::source_ranks, source, "the end"));
  if (state_ != State::kFinishing) return Unexpected("a source's end");
  TB_RETURN_IF_ERROR(CheckVersion(SourceName(source), done.version(), done.channel_epoch()));
  std::set<std::uint32_t> named;
  for (const proto::RouteReceipt& route : done.routes()) {
    TB_RETURN_IF_ERROR(CheckCounted(source, route));
    if (!named.insert(route.target_rank()).second) {
      return Malformed(fmt::format("{} names its route to {} twice", SourceName(source),
                                   TargetName(route.target_rank())));
    }
  }
  for (auto at = routes_.lower_bound({source, 0}); at != routes_.end() && at->first.first == source;
       ++at) {
    if (named.contains(at->first.second)) continue;
    return Mismatch(fmt::format("{} leaves out its route to {}, which received {}",
                                SourceName(source), TargetName(at->first.second),
                                ToText(at->second.source)));
  }
  source_done_.insert(source);
  if (source_done_.size() < config_.source->layout.rank_count) return Step::kNone;
  state_ = State::kFlipping;
  return Step::kFlipPrepare;
}

Result<Session::Step> Session::OnFlipReady(const std::string& agent, std::uint32_t target_rank) {
  TB_RETURN_IF_ERROR(CheckOwner(agent, &Participant::target_ranks, target_rank, "a flip"));
  if (state_ != State::kFlipping) return Unexpected("readiness to flip");
  flip_ready_.insert(target_rank);
  if (flip_ready_.size() < config_.target->layout.rank_count) return Step::kNone;
  state_ = State::kCommitting;
  return Step::kFlipCommit;
}

Result<Session::Step> Session::OnFlipDone(const std::string& agent, std::uint32_t target_rank) {
  TB_RETURN_IF_ERROR(CheckOwner(agent, &Participant::target_ranks, target_rank, "a flip"));
  if (state_ != State::kCommitting) return Unexpected("a finished flip");
  flip_done_.insert(target_rank);
  if (flip_done_.size() < config_.target->layout.rank_count) return Step::kNone;
  state_ = State::kDone;
  return Step::kEnd;
}

std::vector<std::string> Session::Missing() const {
  std::vector<std::string> out;
  const auto targets = [&](const std::set<std::uint32_t>& have, const char* what) {
    for (std::uint32_t rank = 0; rank < config_.target->layout.rank_count; ++rank) {
      if (!have.contains(rank)) out.push_back(TargetName(rank) + " has not " + what);
    }
  };
  switch (state_) {
    case State::kPreparing:
      for (const Participant& participant : config_.participants) {
        if (ready_.contains(participant.agent)) continue;
        const std::string first = participant.target_ranks.empty()
                                      ? SourceName(participant.source_ranks.front())
                                      : TargetName(participant.target_ranks.front());
        out.push_back(
            fmt::format("{} (agent {}) has not answered Prepare", first, participant.agent));
      }
      break;
    case State::kMoving:
      targets(received_, "reported its receipt");
      break;
    case State::kFinishing:
      for (std::uint32_t rank = 0; rank < config_.source->layout.rank_count; ++rank) {
        if (!source_done_.contains(rank)) out.push_back(SourceName(rank) + " has not finished");
      }
      break;
    case State::kFlipping:
      targets(flip_ready_, "got ready to flip");
      break;
    case State::kCommitting:
      targets(flip_done_, "flipped");
      break;
    case State::kDone:
    case State::kFailed:
      break;
  }
  if (out.size() > kMaxListedFaults) out.resize(kMaxListedFaults);
  return out;
}

}  // namespace tensorbus::daemon
