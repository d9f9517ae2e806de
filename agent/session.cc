#include "agent/session.h"

#include <algorithm>
#include <fmt/format.h>

#include "agent/piece_work.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/base/log.h"
#include "tensorbus/rpc/status_map.h"

// The end of a session (flip, failure, abort) and what all its parts share.
namespace tensorbus::agent {
namespace {

/// How long a failed session is remembered, so that late messages about it find it.
constexpr Nanos kForgetAfter = std::chrono::seconds(5);

}  // namespace

Session::Session(SessionSpec spec, SessionHost& host) : spec_(std::move(spec)), host_(host) {}

Session::~Session() = default;

std::string_view Session::phase_name() const {
  switch (phase_) {
    case Phase::kPreparing:
      return "preparing";
    case Phase::kReady:
      return "ready, waiting to be told to go";
    case Phase::kMoving:
      return "moving bytes";
    case Phase::kVerified:
      return "verified, waiting for the other ranks";
    case Phase::kStopping:
      return "waiting for engines to stop at a step edge";
    case Phase::kFlipReady:
      return "ready to flip, waiting for the other ranks";
    case Phase::kCommitting:
      return "flipping";
    case Phase::kFlipped:
      return "flipped, waiting for the other ranks";
    case Phase::kFailed:
      return "failed";
  }
  return "";
}

void Session::FlipPrepare() {
  if (!running()) return;
  if (phase_ != Phase::kVerified) {
    return Fail(Status(Code::kFailedPrecondition,
                       fmt::format("told to prepare the flip while {}", phase_name()),
                       Reason::kMalformed));
  }
  phase_ = Phase::kStopping;
  for (std::size_t i = 0; i < targets_.size() && running(); ++i) {
    const auto stopped = [this, i] {
      targets_[i].flip_ready = true;
      proto::AgentMessage message;
      message.mutable_flip_ready()->set_session(spec_.id.value);
      message.mutable_flip_ready()->set_target_rank(targets_[i].rank->identity.rank);
      host_.Send(std::move(message));
      const bool all = std::all_of(targets_.begin(), targets_.end(),
                                   [](const TargetPart& part) { return part.flip_ready; });
      if (all) phase_ = Phase::kFlipReady;
    };
    // in_place engines stand still since the first byte.
    if (spec_.flip == FlipMode::kInPlace) {
      stopped();
    } else {
      CallHook(i, wire::MessageType::kFlipBegin, stopped);
    }
  }
  if (targets_.empty()) phase_ = Phase::kFlipReady;
}

void Session::FlipCommit() {
  if (!running()) return;
  if (phase_ != Phase::kFlipReady) {
    return Fail(Status(Code::kFailedPrecondition,
                       fmt::format("told to flip while {}", phase_name()), Reason::kMalformed));
  }
  phase_ = Phase::kCommitting;
  phase_begin_ns_ = RealtimeNs();
  for (std::size_t i = 0; i < targets_.size() && running(); ++i) CommitPart(i);
  if (targets_.empty()) phase_ = Phase::kFlipped;
}

void Session::CommitPart(std::size_t index) {
  TargetPart& part = targets_[index];
  const TimePoint begin = host_.executor().Now();
  part.committing = true;
  if (spec_.flip == FlipMode::kInPlace) return PartLive(index, begin);
  ++busy_;
  CopyPieces({host_.pool(), host_.executor(), deadline_}, part.rank->pieces, part.memory,
             part.rank->memory, [weak = weak_from_this(), index, begin](const Status& copied) {
               const auto self = weak.lock();
               if (self == nullptr) return;
               --self->busy_;
               if (!self->running()) return self->CheckDrained();
               if (!copied.ok()) {
                 return self->Fail(copied.Annotate("shadow to live memory of " +
                                                   self->targets_[index].rank->Name()));
               }
               self->PartLive(index, begin);
             });
}

// The memory is the new version, whole; now the engine may know.
void Session::PartLive(std::size_t index, TimePoint begin) {
  TargetPart& part = targets_[index];
  part.flipped = true;
  part.rank->live_version = spec_.version;
  part.rank->dirty = false;
  part.rank->page->live_version.store(spec_.version.value, std::memory_order_release);
  CallHook(index, wire::MessageType::kLive, [this, index, begin] {
    TargetPart& live = targets_[index];
    Trace("flip", TrackOf(*live.rank), phase_begin_ns_, live.bytes);
    proto::AgentMessage message;
    proto::FlipDone& done = *message.mutable_flip_done();
    done.set_session(spec_.id.value);
    done.set_target_rank(live.rank->identity.rank);
    done.set_flip_seconds(Seconds(host_.executor().Now() - begin));
    host_.Send(std::move(message));
    live.told = true;
    const bool all = std::all_of(targets_.begin(), targets_.end(),
                                 [](const TargetPart& each) { return each.told; });
    if (all) phase_ = Phase::kFlipped;
    if (all && detached_) Detach();
  });
}

void Session::DaemonLost(const Status& why) {
  if (over_) return;
  if (phase_ == Phase::kCommitting) {
    detached_ = true;
  } else if (phase_ == Phase::kFlipped) {
    Detach();
  } else {
    Abort(why);
  }
}

// All ranks here serve the version: their updates are done, although no daemon says so any more.
void Session::Detach() {
  host_.executor().CancelTimer(deadline_timer_);
  const double seconds = Seconds(spec_.timeout - TimeLeft());
  for (TargetPart& part : targets_) TellUpdated(part, seconds);
  over_ = true;
}

void Session::TellUpdated(TargetPart& part, double seconds) {
  part.rank->target_of.reset();
  wire::Updated updated;
  updated.version = spec_.version;
  updated.session = spec_.id;
  updated.bytes = part.bytes;
  updated.seconds = seconds;
  if (part.bytes != 0) updated.copy_seconds = Seconds(part.last_byte - part.first_byte);
  updated.digest = part.digest;
  host_.TellUpdated(*part.rank, updated);
}

void Session::Ended(double seconds) {
  if (over_) return;
  host_.executor().CancelTimer(deadline_timer_);
  if (phase_ == Phase::kFailed) {
    abort_came_ = true;
    return CloseOver();
  }
  for (TargetPart& part : targets_) TellUpdated(part, seconds);
  Log(LogLevel::kInfo, "session_done",
      {{"session", spec_.id.value},
       {"version", spec_.version.value},
       {"seconds", fmt::format("{:.6f}", seconds)}});
  over_ = true;
}

void Session::Fail(Status why) {
  if (!running()) return;
  const std::string trace = DumpTrace(why);
  Log(LogLevel::kWarn, "session_failed",
      {{"session", spec_.id.value}, {"phase", phase_name()}, {"error", why}, {"trace", trace}});
  failure_ = std::move(why);
  if (!trace.empty()) {
    failure_ = Status(failure_.code(), fmt::format("{} (trace: {})", failure_.message(), trace),
                      failure_.reason(), failure_.native());
  }
  report_ = true;
  StopCopies();
}

void Session::Abort(const Status& why) {
  if (over_) return;
  abort_came_ = true;
  if (running()) {
    const std::string trace = DumpTrace(why);
    Log(LogLevel::kInfo, "session_aborted",
        {{"session", spec_.id.value}, {"phase", phase_name()}, {"error", why}, {"trace", trace}});
    failure_ = why.ok() ? Status(Code::kAborted, "the session was aborted") : why;
    return StopCopies();
  }
  CloseOver();
}

void Session::RankLeft(const Rank& rank, const std::string& why) {
  // A source that has finished is not needed any more; it has no routes open.
  const bool source = std::any_of(sources_.begin(), sources_.end(), [&](const SourcePart& part) {
    return part.rank.get() == &rank && (part.exposed || !finishing_);
  });
  const bool target = std::any_of(targets_.begin(), targets_.end(),
                                  [&](const TargetPart& part) { return part.rank.get() == &rank; });
  if (!source && !target) return;
  // The survivors' commit is on its way; a missing rank makes the replica incomplete, not mixed.
  if (phase_ == Phase::kFlipped) return;
  Fail(Status(Code::kUnavailable, fmt::format("{} left: {}", rank.Name(), why), Reason::kPeerLost));
}

void Session::StopCopies() {
  phase_ = Phase::kFailed;
  host_.executor().CancelTimer(deadline_timer_);
  waiting_.clear();
  host_.local().Cancel(spec_.id);
  if (host_.remote() != nullptr) host_.remote()->Cancel(spec_.id);
  // Waits for the copies to stop by themselves when none runs any more.
  host_.executor().Post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->CheckDrained();
  });
}

// Only when no byte moves any more can it be said what is left behind.
void Session::CheckDrained() {
  if (phase_ != Phase::kFailed || drained_ || in_flight_ != 0 || busy_ != 0) return;
  drained_ = true;
  proto::AgentMessage message;
  proto::SessionFailed& failed = *message.mutable_session_failed();
  failed.set_session(spec_.id.value);
  *failed.mutable_error() = rpc::ToProto(failure_);
  MarkDirty(&failed);
  // Whoever aborted it has to know what it left behind, also when that is nothing.
  if (report_ || !targets_.empty()) host_.Send(std::move(message));
  WithdrawAll([self = shared_from_this()] { self->CloseOver(); });
  host_.executor().PostAfter(kForgetAfter, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->over_ = true;
  });
}

void Session::MarkDirty(proto::SessionFailed* failed) {
  for (TargetPart& part : targets_) {
    Rank& rank = *part.rank;
    if (rank.target_of != spec_.id) continue;  // it was busy with another session
    rank.target_of.reset();
    if (part.flipped) {
      host_.OnTargetFree(rank);
      continue;
    }
    const bool touched = spec_.flip == FlipMode::kInPlace ? part.started : part.committing;
    if (touched) {
      rank.dirty = true;
      failed->add_dirty_target_ranks(rank.identity.rank);
      Log(LogLevel::kError, "rank_dirty", {{"rank", rank.Name()}, {"session", spec_.id.value}});
    }
    host_.OnTargetFree(rank);
  }
}

void Session::WithdrawAll(std::function<void()> done) {
  using Open = std::vector<std::pair<transport::Transport*, transport::RouteKey>>;
  auto open = std::make_shared<Open>();
  auto memory = std::make_shared<std::vector<std::shared_ptr<const MemoryAccess>>>();
  for (SourcePart& part : sources_) {
    if (!part.exposed) continue;
    part.exposed = false;
    memory->push_back(part.memory);
    for (const BoundRoute& route : *part.routes) {
      if (auto* transport = TransportTo(ParticipantOfTarget(route.target_rank))) {
        open->emplace_back(transport, KeyOf(route));
      }
    }
  }
  if (open->empty()) return done();
  ++busy_;
  // Withdraw() waits for reads that are under way: not on the executor.
  std::vector<WorkPool::Task> tasks;
  tasks.push_back([open, memory] {
    for (const auto& [transport, key] : *open) transport->Withdraw(key);
  });
  host_.pool().SubmitAll(std::move(tasks), host_.executor(),
                         [self = shared_from_this(), done = std::move(done)] {
                           --self->busy_;
                           done();
                         });
}

void Session::CloseOver() {
  if (drained_ && abort_came_ && busy_ == 0) over_ = true;
}

void Session::Shutdown() {
  host_.local().Cancel(spec_.id);
  if (host_.remote() != nullptr) host_.remote()->Cancel(spec_.id);
  for (SourcePart& part : sources_) {
    if (!part.exposed) continue;
    part.exposed = false;
    for (const BoundRoute& route : *part.routes) {
      if (auto* transport = TransportTo(ParticipantOfTarget(route.target_rank))) {
        transport->Withdraw(KeyOf(route));
      }
    }
  }
  phase_ = Phase::kFailed;
}

const SessionParticipant* Session::ParticipantOfSource(std::uint32_t rank) const {
  for (const SessionParticipant& each : spec_.participants) {
    if (std::find(each.source_ranks.begin(), each.source_ranks.end(), rank) !=
        each.source_ranks.end()) {
      return &each;
    }
  }
  return nullptr;
}

const SessionParticipant* Session::ParticipantOfTarget(std::uint32_t rank) const {
  for (const SessionParticipant& each : spec_.participants) {
    if (std::find(each.target_ranks.begin(), each.target_ranks.end(), rank) !=
        each.target_ranks.end()) {
      return &each;
    }
  }
  return nullptr;
}

bool Session::IsOwn(const SessionParticipant* participant) const {
  return participant != nullptr && participant->agent == host_.agent_name();
}

transport::Transport* Session::TransportTo(const SessionParticipant* participant) const {
  if (participant == nullptr) return nullptr;
  return IsOwn(participant) ? &host_.local() : host_.remote();
}

transport::RouteKey Session::KeyOf(const BoundRoute& route) const {
  return {.session = spec_.id, .source_rank = route.source_rank, .target_rank = route.target_rank};
}

std::string Session::TrackOf(const Rank& rank) const {
  return fmt::format("{}/{}/{}/{}", rank.identity.channel, rank.identity.job, rank.identity.replica,
                     rank.identity.rank);
}

void Session::CallHook(std::size_t index, wire::MessageType hook, std::function<void()> then) {
  // Whoever does not answer has to be named before the session's own time is over: the daemon knows
  // only that receipts are missing.
  const Nanos all = TimeLeft();
  const Nanos left = all - std::min<Nanos>(std::chrono::seconds(1), all / 10);
  wire::HookEvent event;
  event.session = spec_.id;
  event.version = spec_.version;
  event.timeout_ms = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
  host_.CallHook(targets_[index].rank, hook, event, left,
                 [weak = weak_from_this(), then = std::move(then)](const Status& answered) {
                   const auto self = weak.lock();
                   if (self == nullptr || !self->running()) return;
                   if (!answered.ok()) return self->Fail(answered);
                   then();
                 });
}

void Session::Trace(std::string name, std::string track, std::uint64_t begin_ns,
                    std::uint64_t bytes) {
  TraceRecord record;
  record.name = std::move(name);
  record.track = std::move(track);
  record.session = spec_.id;
  record.begin_ns = begin_ns;
  record.end_ns = RealtimeNs();
  record.bytes = bytes;
  host_.trace().Add(std::move(record));
}

std::string Session::DumpTrace(const Status& why) {
  Trace(fmt::format("failed while {}", phase_name()), host_.agent_name(), phase_begin_ns_, 0);
  return host_.DumpTrace(spec_.id, why);
}

Nanos Session::TimeLeft() const {
  return std::max<Nanos>(deadline_ - host_.executor().Now(), std::chrono::milliseconds(1));
}

Status DirtyStatus(const Rank& rank, const Status& cause) {
  return {Code::kFailedPrecondition,
          fmt::format("{} holds a mixture of two versions and must not serve; ask for a version to "
                      "repair it ({})",
                      rank.Name(), cause.message()),
          Reason::kDirty};
}

}  // namespace tensorbus::agent
