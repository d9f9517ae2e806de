#include "worker_shim/client.h"

// Announcing memory and what lies in it; again with another agent.

#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>

#include "worker_shim/client_internal.h"

namespace tensorbus::worker_shim {
namespace {

using wire::MessageType;

}  // namespace

Result<std::uint32_t> Client::Attach(const Segment& segment) {
  TB_RETURN_IF_ERROR(CheckProcess());
  if (segment.address == nullptr || segment.bytes == 0) {
    return Status(Code::kInvalidArgument, "a segment without memory");
  }
  UniqueFd fd;
  if (segment.fd >= 0) {
    fd.reset(::fcntl(segment.fd, F_DUPFD_CLOEXEC, 0));
    if (!fd.valid()) return ErrnoStatus(errno, "duplicating the descriptor of a segment");
  }
  MutexLock lock(mutex_);
  if (segments_.size() >= wire::kMaxSegments) {
    return Status(
        Code::kResourceExhausted,
        fmt::format("more than {} segments; put tensors into an arena", wire::kMaxSegments));
  }
  segments_.push_back({segment.address, segment.bytes, std::move(fd)});
  return static_cast<std::uint32_t>(segments_.size() - 1);
}

void Client::DetachAll() {
  MutexLock lock(mutex_);
  segments_.clear();
}

Result<wire::Registered> Client::Register(wire::Register message, Nanos timeout) {
  const TimePoint deadline = After(timeout);
  TB_RETURN_IF_ERROR(CheckProcess());
  {
    MutexLock lock(mutex_);
    message.registration.segment_bytes.clear();
    for (const OwnedSegment& segment : segments_) {
      message.registration.segment_bytes.push_back(segment.bytes);
    }
    TB_RETURN_IF_ERROR(Validate(message.registration, options_.identity.rank,
                                options_.identity.role == Role::kConsumer));
    // The agent refuses it too, but by then buckets would be packed from where the new one says.
    if (!reading_ && lost_.ok()) Pump(TimePoint::min());
    for (const auto& [request, pending] : pending_) {
      if (pending.outcome.has_value()) continue;
      return Status(Code::kFailedPrecondition,
                    "another request of this rank has no answer yet; wait for it, or cancel it, "
                    "before registering anew",
                    Reason::kBusy);
    }
    registration_ = std::move(message);
    // What was published was what lay where the registration before this one said.
    accepted_ = Offer();
    unanswered_ = Version();
  }
  return SendRegistration(deadline, /*returns=*/false);
}

wire::Return Client::MakeReturn() const {
  wire::Return back;
  back.epoch = epoch_;
  back.published = accepted_.message.version;
  back.publishing = unanswered_;
  const bool held =
      held_.value != 0 && released_version() < held_ && write_count() == accepted_.write_count;
  if (held) {
    back.held = accepted_.message;
    back.write_count = accepted_.write_count;
  }
  return back;
}

Result<wire::Registered> Client::SendRegistration(TimePoint deadline, bool returns) {
  std::vector<RequestId> attached;
  RequestId registered;
  {
    MutexLock lock(mutex_);
    TB_RETURN_IF_ERROR(lost_);
    NoteUnended();  // by a session of the registration that this one replaces
    registration_->dirty = dirty_.load();
    mode_ = MemoryMode::kMapped;  // until the agent says how it reaches our memory
    std::vector<std::byte*> addresses;
    bool any_private = false;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      const OwnedSegment& segment = segments_[i];
      wire::AttachSegment attach;
      attach.segment = static_cast<std::uint32_t>(i);
      attach.mapped = segment.fd.valid();
      attach.bytes = segment.bytes;
      attach.address = reinterpret_cast<std::uintptr_t>(segment.address);
      std::vector<UniqueFd> fds;
      if (attach.mapped) {
        fds.emplace_back(::fcntl(segment.fd.get(), F_DUPFD_CLOEXEC, 0));
        if (!fds[0].valid()) return ErrnoStatus(errno, "duplicating the descriptor of a segment");
      }
      any_private = any_private || !attach.mapped;
      // The agent touches what it maps; in our own memory only we can.
      if (!attach.mapped && options_.identity.role == Role::kConsumer) {
        TB_RETURN_IF_ERROR(TouchPages({segment.address, segment.bytes}));
      }
      TB_ASSIGN_OR_RETURN(const RequestId request,
                          Ask(MessageType::kAttachSegment, MessageType::kReply,
                              wire::Encode(attach), std::move(fds)));
      attached.push_back(request);
      addresses.push_back(segment.address);
    }
    // Where Yama restricts ptrace to descendants, this lets the agent read and write our private
    // memory; elsewhere it fails without harm.
    if (any_private) ::prctl(PR_SET_PTRACER, agent_pid_, 0, 0, 0);
    // The agent orders nothing from these pieces before it has read the registration.
    buckets_.SetMemory(registration_->registration, std::move(addresses));
    registration_->back = returns ? MakeReturn() : wire::Return();
    TB_ASSIGN_OR_RETURN(registered, Ask(MessageType::kRegister, MessageType::kRegistered,
                                        wire::Encode(*registration_)));
  }
  Status failure;
  for (const RequestId request : attached) {
    const Result<Outcome> outcome = WaitUntil(request, deadline);
    const Status status = outcome.ok() ? outcome->status : outcome.status();
    if (failure.ok()) failure = status;
    if (!outcome.ok()) Forget(request);
  }
  Result<Outcome> outcome = WaitUntil(registered, deadline);
  if (!outcome.ok()) Forget(registered);
  TB_RETURN_IF_ERROR(failure);
  TB_RETURN_IF_ERROR(outcome.status());
  TB_RETURN_IF_ERROR(outcome->status);
  MutexLock lock(mutex_);
  epoch_ = outcome->registered.epoch;
  return std::move(outcome->registered);
}

Result<wire::Registered> Client::Reconnect(Nanos timeout) {
  const TimePoint deadline = After(timeout);
  TB_RETURN_IF_ERROR(CheckProcess());
  {
    MutexLock lock(mutex_);
    if (!registration_.has_value()) {
      return Status(Code::kFailedPrecondition, "nothing was registered yet");
    }
    if (reconnecting_) {
      return Status(Code::kFailedPrecondition, "another thread is connecting again", Reason::kBusy);
    }
    reconnecting_ = true;
    if (lost_.ok()) Lose(Status(Code::kCancelled, "connecting again", Reason::kCancelled));
  }
  Result<wire::Registered> registered = ComeBack(deadline);
  MutexLock lock(mutex_);
  reconnecting_ = false;
  // Half a conversation is none: nobody reads the memory, and the next attempt begins from here.
  if (!registered.ok() && lost_.ok()) Lose(registered.status());
  changed_.NotifyAll();
  return registered;
}

Result<wire::Registered> Client::ComeBack(TimePoint deadline) {
  {
    MutexLock lock(mutex_);
    // A thread that was reading the old socket lets go of it first.
    while (reading_) {
      if (!changed_.WaitUntil(mutex_, deadline) && Now() >= deadline) {
        return Status(Code::kDeadlineExceeded, "another thread is still in a hook");
      }
    }
    buckets_.DropBuckets();
  }
  TB_RETURN_IF_ERROR(Open(deadline));
  return SendRegistration(deadline, /*returns=*/true);
}

}  // namespace tensorbus::worker_shim
