#include <algorithm>
#include <fmt/format.h>

#include "agent/receipts.h"
#include "agent/session.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/transport/route_check.h"

// The middle of a session: from Go to the receipts of every target rank, and the sources' Finish.
namespace tensorbus::agent {
namespace {

/// Routes of one session that are pulled at the same time. Local ones share the copy threads, so
/// that many targets can be fed from one pass over a source.
constexpr std::size_t kRoutesInFlightMax = 64;
/// How long a source that was told to go by another message may take to open its routes.
constexpr Nanos kExposeGrace = std::chrono::seconds(3);
constexpr Nanos kRetryDelayMax = std::chrono::milliseconds(50);

/// The tcp endpoint of a participant, or its first.
std::string EndpointOf(const SessionParticipant& participant, std::string_view transport) {
  const std::string scheme = std::string(transport) + "://";
  for (const std::string& endpoint : participant.endpoints) {
    if (endpoint.compare(0, scheme.size(), scheme) == 0) return endpoint;
  }
  return participant.endpoints.empty() ? std::string() : participant.endpoints.front();
}

}  // namespace

void Session::Go() {
  if (phase_ == Phase::kPreparing) {
    going_ = true;
    return;
  }
  if (phase_ != Phase::kReady) return;
  phase_ = Phase::kMoving;
  phase_begin_ns_ = RealtimeNs();
  if (targets_.empty()) {
    phase_ = Phase::kVerified;
    return;
  }
  // An in_place engine stands still before the first byte; a shadow's bytes disturb nobody.
  if (spec_.flip == FlipMode::kShadow) return StartPulls();
  for (std::size_t i = 0; i < targets_.size() && running(); ++i) {
    CallHook(i, wire::MessageType::kFence, [this] {
      if (++fenced_ == targets_.size()) StartPulls();
    });
  }
}

// All targets at once: they flip together anyway, and what several take from one source is then
// read once.
void Session::StartPulls() {
  const TimePoint give_up = host_.executor().Now() + kExposeGrace;
  for (std::size_t index = 0; index < targets_.size(); ++index) {
    TargetPart& part = targets_[index];
    part.results.resize(part.routes->size());
    for (std::size_t route = 0; route < part.routes->size(); ++route) {
      waiting_.push_back({.part = index, .route = route, .give_up = give_up});
    }
  }
  std::stable_sort(
      waiting_.begin(), waiting_.end(),
      [this](const PendingPull& a, const PendingPull& b) { return SourceOf(a) < SourceOf(b); });
  for (std::size_t index = 0; index < targets_.size() && running(); ++index) {
    if (targets_[index].routes->empty()) PartPulled(index);
  }
  PullNext();
}

std::uint32_t Session::SourceOf(const PendingPull& pull) const {
  return (*targets_[pull.part].routes)[pull.route].source_rank;
}

// Whole sources at a time.
void Session::PullNext() {
  while (running() && !waiting_.empty() && in_flight_ < kRoutesInFlightMax) {
    const std::uint32_t source = SourceOf(waiting_.front());
    for (bool more = true; more && running();) {
      const PendingPull pull = waiting_.front();
      waiting_.pop_front();
      more = !waiting_.empty() && SourceOf(waiting_.front()) == source;
      StartPull(pull, more);
    }
  }
}

void Session::StartPull(PendingPull pull, bool more_follow) {
  TargetPart& part = targets_[pull.part];
  const BoundRoute& route = (*part.routes)[pull.route];
  const SessionParticipant* source = ParticipantOfSource(route.source_rank);
  transport::Transport* transport = TransportTo(source);
  if (transport == nullptr) {
    return Fail(
        Status(Code::kUnimplemented,
               fmt::format("rank {} of {} is at another agent and this one has no transport "
                           "to it; start it with --data-listen",
                           route.source_rank, spec_.source_job),
               Reason::kUnsupported));
  }
  part.started = true;
  ++in_flight_;
  host_.pulls().Add();
  transport::PullOptions options;
  options.proof = spec_.proof;
  options.deadline = deadline_;
  options.capability = spec_.capability;
  options.more_follow = more_follow;
  if (!IsOwn(source)) options.peer = EndpointOf(*source, transport->name());
  transport::RouteEnd end = route.At(part.memory->bases());
  end.memory = part.memory->foreign();
  transport->Pull(
      KeyOf(route), std::move(end), std::move(options),
      // Keeps the memory alive for as long as the transport may write to it.
      [weak = weak_from_this(), memory = part.memory, pull, &executor = host_.executor(),
       &pulls = host_.pulls()](Result<transport::PullResult> result) {
        auto kept = std::make_shared<Result<transport::PullResult>>(std::move(result));
        executor.Post([weak, memory, pull, kept] {
          if (const auto self = weak.lock()) self->PullDone(pull, std::move(*kept));
        });
        pulls.Remove();
      });
}

void Session::PullDone(PendingPull pull, Result<transport::PullResult> result) {
  --in_flight_;
  if (!running()) return CheckDrained();
  TargetPart& part = targets_[pull.part];
  const BoundRoute& route = (*part.routes)[pull.route];
  if (!result.ok()) {
    const bool not_yet =
        result.status().code() == Code::kNotFound && host_.executor().Now() < pull.give_up;
    if (!not_yet) return Fail(NameFault(part, route, result.status()));
    const Nanos delay = pull.retry_delay;
    pull.retry_delay = std::min(kRetryDelayMax, delay * 2);
    host_.executor().PostAfter(delay, [weak = weak_from_this(), pull] {
      const auto self = weak.lock();
      if (self == nullptr || !self->running()) return;
      self->waiting_.push_back(pull);
      self->PullNext();
    });
    return PullNext();
  }
  if (const Status checked = CheckRoute(part, route, *result); !checked.ok()) return Fail(checked);
  host_.CountBytesMoved(route.bytes);
  part.bytes += route.bytes;
  part.digest += result->target.total();
  part.first_byte = std::min(part.first_byte, result->first_byte);
  part.last_byte = std::max(part.last_byte, result->last_byte);
  part.results[pull.route] = *std::move(result);
  if (++part.pulled == part.routes->size()) PartPulled(pull.part);
  PullNext();
}

// The transport compared already; a receipt that nobody compares twice is one bug away from a
// success that did not happen.
Status Session::CheckRoute(const TargetPart& part, const BoundRoute& route,
                           const transport::PullResult& result) const {
  if (spec_.proof == Proof::kOff) return {};
  const std::size_t count = route.blocks.size();
  if (result.source.blocks.size() != count || result.target.blocks.size() != count) {
    return {Code::kDataLoss,
            fmt::format("the receipt of {}/{} rank {} to {} has {} and {} blocks, the route has {}",
                        spec_.channel, spec_.source_job, route.source_rank, part.rank->Name(),
                        result.source.blocks.size(), result.target.blocks.size(), count),
            Reason::kChecksumMismatch};
  }
  const std::vector<DigestSum>* published = ReceiptOf(route);
  for (std::size_t i = 0; i < count; ++i) {
    const DigestSum& source = result.source.blocks[i];
    if (source.bytes != route.blocks[i].block.bytes() || source != result.target.blocks[i]) {
      return BlockFault(part, route, i);
    }
    if (published != nullptr && (*published)[i] != source) {
      const auto writer = std::find_if(sources_.begin(), sources_.end(), [&](const SourcePart& s) {
        return s.rank->identity.rank == route.source_rank;
      });
      const CopyOp op = OpOf(route, i);
      return WrittenDuringPublish(*writer->rank, spec_.version,
                                  plan_->target->tensors[op.tensor].spec.name + op.box.ToString());
    }
  }
  return {};
}

// What the source counted at publish, or before its routes were opened; null when nobody asked.
const RouteSums* Session::SumsOf(const SourcePart& part) const {
  const auto receipts = part.rank->receipts.find(spec_.version);
  if (receipts == part.rank->receipts.end()) return nullptr;
  const auto sums = receipts->second.routes.find(plan_key_);
  return sums == receipts->second.routes.end() ? nullptr : &sums->second;
}

const std::vector<DigestSum>* Session::ReceiptOf(const BoundRoute& target_route) const {
  for (const SourcePart& source : sources_) {
    if (source.rank->identity.rank != target_route.source_rank) continue;
    const RouteSums* const sums = SumsOf(source);
    for (std::size_t i = 0; sums != nullptr && i < source.routes->size(); ++i) {
      if ((*source.routes)[i].target_rank == target_route.target_rank) return &(*sums)[i];
    }
  }
  return nullptr;
}

// Written out once more: ops are only asked for to name a fault.
CopyOp Session::OpOf(const BoundRoute& route, std::size_t block) const {
  const planner::Plan part = planner::PlanForRanks(plan_->classes, {{}, {route.target_rank}});
  return planner::RouteOps(part, route.source_rank, route.target_rank)[block];
}

Status Session::BlockFault(const TargetPart& part, const BoundRoute& route,
                           std::size_t block) const {
  const CopyOp op = OpOf(route, block);
  return {Code::kDataLoss,
          fmt::format("{}{} from {}/{} rank {} to {}: what arrived is not what was sent",
                      plan_->target->tensors[op.tensor].spec.name, op.box.ToString(), spec_.channel,
                      spec_.source_job, route.source_rank, part.rank->Name()),
          Reason::kChecksumMismatch};
}

Status Session::NameFault(const TargetPart& part, const BoundRoute& route,
                          const Status& failure) const {
  const std::optional<std::uint32_t> block = transport::MismatchedBlock(failure);
  if (block.has_value() && *block < route.blocks.size()) return BlockFault(part, route, *block);
  return failure.Annotate(fmt::format("{}/{} rank {} to {}", spec_.channel, spec_.source_job,
                                      route.source_rank, part.rank->Name()));
}

void Session::PartPulled(std::size_t index) {
  if (spec_.proof == Proof::kMemory) return CheckMemory(index);
  PartVerified(index);
}

// Everything the target rank holds, once more from memory, through its registration's addresses:
// the sums of the copy ops must add up to those of the pieces.
void Session::CheckMemory(std::size_t index) {
  const TargetPart& part = targets_[index];
  auto expected =
      std::make_shared<std::vector<DigestSum>>(part.rank->pieces->registration().pieces.size());
  for (std::size_t r = 0; r < part.routes->size(); ++r) {
    const BoundRoute& route = (*part.routes)[r];
    const std::vector<DigestSum>& sums = part.results[r].source.blocks;
    for (std::size_t i = 0; i < route.blocks.size(); ++i) {
      (*expected)[route.blocks[i].piece] += sums[i];
    }
    for (const BoundRoute::Alias& alias : route.aliases) {
      (*expected)[alias.place.piece] += sums[alias.block];
    }
  }
  ++busy_;
  DigestPieces(
      {host_.pool(), host_.executor(), deadline_}, part.rank->pieces, part.memory,
      [weak = weak_from_this(), index, expected](const Result<std::vector<DigestSum>>& sums) {
        const auto self = weak.lock();
        if (self == nullptr) return;
        --self->busy_;
        if (!self->running()) return self->CheckDrained();
        if (!sums.ok()) return self->Fail(sums.status());
        const std::int64_t wrong = FirstDifference(*expected, *sums);
        if (wrong < 0) return self->PartVerified(index);
        const Rank& rank = *self->targets_[index].rank;
        self->Fail(
            Status(Code::kDataLoss,
                   fmt::format("{} of {} changed after it had arrived",
                               rank.pieces->NameOf(static_cast<std::uint32_t>(wrong)), rank.Name()),
                   Reason::kChecksumMismatch));
      });
}

void Session::PartVerified(std::size_t index) {
  TargetPart& part = targets_[index];
  part.verified = true;
  Trace("copy", TrackOf(*part.rank), phase_begin_ns_, part.bytes);
  proto::AgentMessage message;
  proto::SessionReceipt& receipt = *message.mutable_session_receipt();
  receipt.set_session(spec_.id.value);
  receipt.set_target_rank(part.rank->identity.rank);
  receipt.set_version(spec_.version.value);
  receipt.set_channel_epoch(spec_.epoch.value);
  for (std::size_t r = 0; r < part.routes->size(); ++r) {
    proto::RouteReceipt& entry = *receipt.add_routes();
    entry.set_source_rank((*part.routes)[r].source_rank);
    entry.set_target_rank(part.rank->identity.rank);
    *entry.mutable_source() = rpc::ToProto(part.results[r].source.total());
    *entry.mutable_target() = rpc::ToProto(part.results[r].target.total());
    *entry.mutable_boxes() = rpc::ToProto((*part.routes)[r].boxes);
    entry.set_located((*part.routes)[r].Located(part.results[r].source.blocks));
  }
  if (part.bytes != 0) receipt.set_copy_seconds(Seconds(part.last_byte - part.first_byte));
  host_.Send(std::move(message));
  const bool all = std::all_of(targets_.begin(), targets_.end(),
                               [](const TargetPart& each) { return each.verified; });
  if (all) phase_ = Phase::kVerified;
}

void Session::Finish() {
  if (!running() || finishing_) return;
  if (phase_ != Phase::kVerified) {
    return Fail(Status(Code::kFailedPrecondition,
                       fmt::format("told to finish while {}", phase_name()), Reason::kMalformed));
  }
  finishing_ = true;
  WithdrawAll([self = shared_from_this()] {
    for (std::size_t i = 0; i < self->sources_.size() && self->running(); ++i) {
      self->SourceClosed(i);
    }
    if (!self->running()) self->CheckDrained();
  });
}

// Nobody reads the source any more: had its writer started, the counter says so.
void Session::SourceClosed(std::size_t index) {
  const SourcePart& part = sources_[index];
  const bool live = part.memory == part.rank->memory;
  if (live && part.rank->write_count() != part.rank->write_count_at_publish) {
    return Fail(WrittenDuringPublish(*part.rank, spec_.version, ""));
  }
  proto::AgentMessage message;
  proto::SourceDone& done = *message.mutable_source_done();
  done.set_session(spec_.id.value);
  done.set_source_rank(part.rank->identity.rank);
  // What the memory is now, whatever it was when the session began.
  done.set_version(live ? part.rank->published.value : spec_.version.value);
  done.set_channel_epoch(part.rank->epoch.value);
  const RouteSums* const sums = SumsOf(part);
  for (std::size_t r = 0; r < part.routes->size(); ++r) {
    proto::RouteReceipt& entry = *done.add_routes();
    entry.set_source_rank(part.rank->identity.rank);
    entry.set_target_rank((*part.routes)[r].target_rank);
    *entry.mutable_boxes() = rpc::ToProto((*part.routes)[r].boxes);
    if (sums == nullptr) continue;
    transport::RouteReceipt own;
    own.blocks = (*sums)[r];
    *entry.mutable_source() = rpc::ToProto(own.total());
    entry.set_located((*part.routes)[r].Located(own.blocks));
  }
  host_.Send(std::move(message));
}

}  // namespace tensorbus::agent
