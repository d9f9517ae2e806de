#include "worker_shim/client.h"

// What comes from the agent: answers, hooks, work on buckets, its end.

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "worker_shim/client_internal.h"

namespace tensorbus::worker_shim {
namespace {

using wire::MessageType;

/// An answer that says how it went, and of which version.
template <typename Message>
Result<Outcome> OutcomeOfVersion(const wire::Frame& frame) {
  Message message;
  TB_RETURN_IF_ERROR(Answered(frame, message));
  Outcome outcome;
  outcome.status = message.status;
  outcome.version = message.version;
  return outcome;
}

Result<Outcome> OutcomeOf(const wire::Frame& frame) {
  Outcome outcome;
  switch (frame.type) {
    case MessageType::kReply: {
      wire::Reply message;
      TB_RETURN_IF_ERROR(Answered(frame, message));
      outcome.status = message.status;
      return outcome;
    }
    case MessageType::kRegistered: {
      TB_RETURN_IF_ERROR(Answered(frame, outcome.registered));
      outcome.status = outcome.registered.status;
      return outcome;
    }
    case MessageType::kReleased:
      return OutcomeOfVersion<wire::Released>(frame);
    case MessageType::kClaimed:
      return OutcomeOfVersion<wire::Claimed>(frame);
    case MessageType::kUpdated: {
      wire::Updated message;
      TB_RETURN_IF_ERROR(Answered(frame, message));
      outcome.status = message.status;
      outcome.version = message.version;
      outcome.session = message.session;
      outcome.bytes = message.bytes;
      outcome.seconds = message.seconds;
      outcome.copy_seconds = message.copy_seconds;
      outcome.digest = message.digest;
      return outcome;
    }
    default:
      return Protocol(fmt::format("message type {}", static_cast<int>(frame.type)));
  }
}

Status DirtyStatus(const RankIdentity& identity, const Status& cause) {
  return {Code::kFailedPrecondition,
          fmt::format("{} may hold a mixture of two versions and must not serve: the connection "
                      "ended before the memory was whole ({}); connect again and ask for a version "
                      "to repair it",
                      identity.ToString(), cause.message()),
          Reason::kDirty, cause.native()};
}

}  // namespace

void Client::Pump(TimePoint deadline) {
  reading_ = true;
  reading_thread_ = std::this_thread::get_id();
  WatchSocket(false);
  const Result<bool> flushed = writer_.Flush(socket_.get());
  if (!ReadFrames() && lost_.ok() && Now() < deadline) {
    const short events =
        static_cast<short>(POLLIN | (flushed.ok() && *flushed ? 0 : static_cast<int>(POLLOUT)));
    pollfd items[2] = {{socket_.get(), events, 0}, {wake_.get(), POLLIN, 0}};
    mutex_.Unlock();
    const Nanos left = std::clamp<Nanos>(deadline - Now(), Nanos::zero(), kPollMax);
    ::poll(items, 2, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()));
    std::uint64_t count = 0;
    if ((items[1].revents & POLLIN) != 0) {
      [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof count);
    }
    mutex_.Lock();
    if (lost_.ok()) {
      [[maybe_unused]] const auto more = writer_.Flush(socket_.get());
      ReadFrames();
    }
  }
  reading_ = false;
  WatchSocket(lost_.ok());
  changed_.NotifyAll();
}

// True when it handled something.
bool Client::ReadFrames() {
  bool any = false;
  while (lost_.ok()) {
    Result<std::optional<wire::Frame>> frame = reader_.Read(socket_.get());
    if (!frame.ok()) {
      const Status& why = frame.status();
      Lose(Status(why.code(),
                  fmt::format("agent at {}: {}; connect again once one runs", options_.agent_socket,
                              why.message()),
                  why.reason(), why.native()));
      return true;
    }
    if (!frame->has_value()) return any;
    HandleFrame(**std::move(frame));
    any = true;
  }
  return any;
}

void Client::HandleFrame(wire::Frame frame) {
  Status status;
  switch (frame.type) {
    case MessageType::kFence:
      status = HandleHook(HookKind::kFence, frame);
      break;
    case MessageType::kFlipBegin:
      status = HandleHook(HookKind::kFlipBegin, frame);
      break;
    case MessageType::kLive:
      status = HandleHook(HookKind::kLive, frame);
      break;
    case MessageType::kPack:
    case MessageType::kUnpack:
      status = HandleBucketWork(frame);
      break;
    case MessageType::kAttachBucket:
      status = HandleAttachBucket(std::move(frame));
      break;
    case MessageType::kPong:
      break;
    case MessageType::kBrokenOff:
      status = BrokenOff(frame);
      break;
    case MessageType::kExplained:
      status = HandleExplained(frame);
      break;
    case MessageType::kReleased:
      // As an event it says what the control page says; BeforeWrite() looks there.
      if (frame.request != 0) status = HandleAnswer(frame);
      break;
    default:
      status = HandleAnswer(frame);
      break;
  }
  if (!status.ok() && lost_.ok()) Lose(std::move(status));
}

Status Client::HandleAnswer(const wire::Frame& frame) {
  const auto found = pending_.find(frame.request);
  if (found == pending_.end() || found->second.outcome.has_value()) {
    return Protocol(fmt::format("an answer (type {}) to request {}, which nobody made",
                                static_cast<int>(frame.type), frame.request));
  }
  TB_ASSIGN_OR_RETURN(Outcome outcome, OutcomeOf(frame));
  NotePublished(outcome, frame.request);
  if (frame.type == MessageType::kRegistered) {
    mode_ = outcome.registered.mode;
    agent_knows_ = outcome.status.ok();
  }
  if (frame.type == MessageType::kUpdated) NoteUpdated(outcome, frame.request);
  if (frame.type == MessageType::kClaimed && outcome.status.ok()) dirty_.store(false);
  if (found->second.answer == MessageType::kGoodbye) {
    pending_.erase(found);
    return {};
  }
  if (found->second.answer != frame.type) {
    return Protocol(fmt::format("answer of type {} instead of {}", static_cast<int>(frame.type),
                                static_cast<int>(found->second.answer)));
  }
  found->second.outcome = std::move(outcome);
  changed_.NotifyAll();
  if (epoll_.valid()) Signal(ended_);
  return {};
}

// Whoever waits hears of it when its time is over. The request may have ended meanwhile.
Status Client::HandleExplained(const wire::Frame& frame) {
  wire::Reply message;
  TB_RETURN_IF_ERROR(Answered(frame, message));
  const auto found = pending_.find(frame.request);
  if (found != pending_.end()) found->second.waits_for = std::move(message.status);
  return {};
}

// A publish that was refused binds nobody.
void Client::NotePublished(const Outcome& outcome, std::uint64_t request) {
  const auto published = publishing_.extract(request);
  if (published.empty() || !outcome.status.ok()) return;
  accepted_ = published.mapped();
  held_ = accepted_.message.version;
  if (unanswered_ <= held_) unanswered_ = Version();
}

Status Client::HandleHook(HookKind kind, const wire::Frame& frame) {
  wire::HookEvent event;
  TB_RETURN_IF_ERROR(Answered(frame, event));
  if (kind == HookKind::kLive) NoteWhole();
  wire::HookDone done;
  const Hook hook = hook_;
  if (hook) {
    mutex_.Unlock();
    done.status = hook(kind, event);
    mutex_.Lock();
  }
  if (!lost_.ok()) return {};
  // An agent that did not get this has written nothing.
  TB_RETURN_IF_ERROR(SendFrame(MessageType::kHookDone, frame.request, wire::Encode(done)));
  if (kind == HookKind::kLive || !done.status.ok()) return {};
  if (mode_ != MemoryMode::kBucket) {
    writing_ = Writing::kBegun;
  } else if (writing_ == Writing::kNone) {
    writing_ = Writing::kAllowed;
  }
  return {};
}

Status Client::HandleBucketWork(const wire::Frame& frame) {
  wire::BucketWork work;
  TB_RETURN_IF_ERROR(Answered(frame, work));
  if (frame.type == MessageType::kUnpack && writing_ == Writing::kAllowed) {
    writing_ = Writing::kBegun;
  }
  mutex_.Unlock();
  wire::BucketDone done;
  done.status = frame.type == MessageType::kPack ? buckets_.Pack(work) : buckets_.Unpack(work);
  mutex_.Lock();
  if (!lost_.ok()) return {};
  return SendFrame(MessageType::kBucketDone, frame.request, wire::Encode(done));
}

Status Client::HandleAttachBucket(wire::Frame frame) {
  wire::AttachBucket attach;
  TB_RETURN_IF_ERROR(Answered(frame, attach));
  if (frame.fds.size() != 1) return Protocol("a bucket without its memory");
  return buckets_.Attach(attach, std::move(frame.fds[0]));
}

Status Client::BrokenOff(const wire::Frame& frame) const {
  wire::Reply why;
  TB_RETURN_IF_ERROR(Answered(frame, why));
  if (why.status.ok()) return Protocol("it breaks off without a reason");
  return {Code::kUnavailable,
          fmt::format("{} was broken off by its agent at {}: {}; connect again once that is put "
                      "right",
                      options_.identity.ToString(), options_.agent_socket, why.status.message()),
          Reason::kPeerLost, why.status.native()};
}

// Another thread may be about to read it, or in a hook that it was asked for before: either finds
// the connection lost.
Status Client::LastWord(Status closed) {
  while (true) {
    const Result<std::optional<wire::Frame>> frame = reader_.Read(socket_.get());
    if (!frame.ok() || !frame->has_value()) return closed;
    if ((*frame)->type == MessageType::kBrokenOff) return BrokenOff(**frame);
  }
}

// The session ended and the agent says what it left behind.
void Client::NoteUpdated(const Outcome& outcome, std::uint64_t request) {
  const bool refused = updates_.empty() || updates_.front() != request;
  std::erase(updates_, request);
  if (refused) return;
  writing_ = Writing::kNone;
  if (outcome.status.ok()) NoteWhole();
  if (outcome.status.reason() == Reason::kDirty) dirty_.store(true);
}

void Client::NoteWhole() {
  writing_ = Writing::kNone;
  dirty_.store(false);
}

// Nobody will say any more what a session left behind: where bytes may be, that is a mixture.
void Client::NoteUnended() {
  if (writing_ == Writing::kBegun) dirty_.store(true);
  writing_ = Writing::kNone;
}

void Client::Lose(Status why) {
  WatchSocket(false);
  lost_ = std::move(why);
  NoteUnended();
  updates_.clear();
  // shutdown() rather than close(): another thread may be in poll() on this number.
  ::shutdown(socket_.get(), SHUT_RDWR);
  for (auto item = pending_.begin(); item != pending_.end();) {
    if (item->second.answer == MessageType::kGoodbye) {
      item = pending_.erase(item);
      continue;
    }
    if (!item->second.outcome.has_value()) {
      const bool dirty = item->second.answer == MessageType::kUpdated && dirty_.load();
      item->second.outcome.emplace();
      item->second.outcome->status = dirty ? DirtyStatus(options_.identity, lost_) : lost_;
    }
    ++item;
  }
  for (const auto& [request, offer] : publishing_) {
    unanswered_ = std::max(unanswered_, offer.message.version);
  }
  publishing_.clear();
  changed_.NotifyAll();
  Signal(wake_);
  if (epoll_.valid()) Signal(ended_);
}

}  // namespace tensorbus::worker_shim
