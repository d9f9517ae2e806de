#include "worker_shim/client.h"

// Announcing memory and what lies in it; again with another agent.

#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>

#include "worker_shim/client_internal.h"

namespace tensorbus::worker_shim {
namespace {

using wire::MessageType;

/// Between two looks whether an agent listens again.
constexpr Nanos kAgentPause = std::chrono::milliseconds(20);

/// Pauses before the next look; false when there is no time for one.
bool PauseBefore(TimePoint deadline) {
  const Nanos left = std::min(kAgentPause, Nanos(deadline - Now()));
  if (left <= Nanos::zero()) return false;
  ::poll(nullptr, 0, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()));
  return true;
}

}  // namespace

Result<std::uint32_t> Client::Attach(const Segment& segment) {
  TB_RETURN_IF_ERROR(CheckProcess());
  if (segment.address == nullptr || segment.bytes == 0) {
    return Status(Code::kInvalidArgument, "a segment without memory");
  }
  std::shared_ptr<const UniqueFd> fd;
  if (segment.fd >= 0) {
    fd = std::make_shared<const UniqueFd>(::fcntl(segment.fd, F_DUPFD_CLOEXEC, 0));
    if (!fd->valid()) return ErrnoStatus(errno, "duplicating the descriptor of a segment");
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
  std::vector<OwnedSegment> segments;
  {
    MutexLock lock(mutex_);
    segments = segments_;
    message.registration.segment_bytes.clear();
    for (const OwnedSegment& segment : segments) {
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
  }
  return SendRegistration(std::move(message), std::move(segments), deadline, /*returns=*/false);
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

Result<std::vector<UniqueFd>> Client::PrepareSegments(
    const std::vector<OwnedSegment>& segments) const {
  std::vector<UniqueFd> fds;
  for (const OwnedSegment& segment : segments) {
    UniqueFd& fd = fds.emplace_back();
    if (segment.fd != nullptr) {
      fd.reset(::fcntl(segment.fd->get(), F_DUPFD_CLOEXEC, 0));
      if (!fd.valid()) return ErrnoStatus(errno, "duplicating the descriptor of a segment");
    } else if (options_.identity.role == Role::kConsumer) {
      // The agent touches what it maps; in our own memory only we can.
      TB_RETURN_IF_ERROR(TouchPages({segment.address, segment.bytes}));
    }
  }
  return fds;
}

Result<std::vector<RequestId>> Client::Announce(std::vector<UniqueFd> fds) {
  std::vector<RequestId> requests;
  bool any_private = false;
  for (std::size_t i = 0; i < registered_segments_.size(); ++i) {
    const OwnedSegment& segment = registered_segments_[i];
    wire::AttachSegment attach;
    attach.segment = static_cast<std::uint32_t>(i);
    attach.mapped = fds[i].valid();
    attach.bytes = segment.bytes;
    attach.address = reinterpret_cast<std::uintptr_t>(segment.address);
    any_private = any_private || !attach.mapped;
    std::vector<UniqueFd> passed;
    if (attach.mapped) passed.push_back(std::move(fds[i]));
    TB_ASSIGN_OR_RETURN(const RequestId request,
                        Ask(MessageType::kAttachSegment, MessageType::kReply, wire::Encode(attach),
                            std::move(passed)));
    requests.push_back(request);
  }
  // Where Yama restricts ptrace to descendants, this lets the agent read and write our private
  // memory; elsewhere it fails without harm.
  if (any_private) ::prctl(PR_SET_PTRACER, agent_pid_, 0, 0, 0);
  TB_ASSIGN_OR_RETURN(
      const RequestId registered,
      Ask(MessageType::kRegister, MessageType::kRegistered, wire::Encode(*registration_)));
  requests.push_back(registered);
  return requests;
}

Result<wire::Registered> Client::SendRegistration(wire::Register message,
                                                  std::vector<OwnedSegment> segments,
                                                  TimePoint deadline, bool returns) {
  bool replaces = false;
  Result<std::vector<RequestId>> requests = std::vector<RequestId>();
  {
    MutexLock lock(mutex_);
    TB_RETURN_IF_ERROR(lost_);
    TB_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, PrepareSegments(segments));
    NoteUnended();  // by a session of the registration that this one replaces
    registration_ = std::move(message);
    registered_segments_ = std::move(segments);
    if (!returns) {
      // What was published was what lay where the registration before this one said.
      accepted_ = Offer();
      unanswered_ = Version();
    }
    registration_->dirty = dirty_.load();
    registration_->back = returns ? MakeReturn() : wire::Return();
    mode_ = MemoryMode::kMapped;  // until the agent says how it reaches our memory
    std::vector<std::byte*> addresses;
    for (const OwnedSegment& segment : registered_segments_) addresses.push_back(segment.address);
    // The agent orders nothing from these pieces before it has read the registration.
    buckets_.SetMemory(registration_->registration, std::move(addresses));
    replaces = agent_knows_;
    requests = Announce(std::move(fds));
    if (requests.ok()) agent_knows_ = true;
  }
  Result<Outcome> outcome = requests.ok() ? AwaitAll(*requests, deadline) : requests.status();
  Status failure = outcome.ok() ? outcome->status : outcome.status();
  MutexLock lock(mutex_);
  if (failure.ok()) {
    epoch_ = outcome->registered.epoch;
    return std::move(outcome->registered);
  }
  // Which registration the agent has now only it can say, and we have forgotten the places of the
  // one before: nobody may read or write either.
  if (replaces && lost_.ok()) {
    Lose(Status(
        Code::kUnavailable,
        fmt::format("registering anew failed, and the connection with it: {}", failure.message()),
        Reason::kPeerLost));
  }
  return failure;
}

Result<Outcome> Client::AwaitAll(const std::vector<RequestId>& requests, TimePoint deadline) {
  Status failure;
  Result<Outcome> last = Outcome();
  for (const RequestId request : requests) {
    last = WaitUntil(request, deadline);
    if (!last.ok()) Forget(request);
    if (failure.ok()) failure = last.ok() ? last->status : last.status();
  }
  TB_RETURN_IF_ERROR(failure);
  return last;
}

Result<wire::Registered> Client::Reconnect(Nanos timeout, const std::function<bool()>& stop) {
  const TimePoint deadline = After(timeout);
  TB_RETURN_IF_ERROR(CheckProcess());
  {
    MutexLock lock(mutex_);
    if (!registration_.has_value()) {
      return Status(Code::kFailedPrecondition, "nothing was registered yet");
    }
    if (coming_back_) {
      return Status(Code::kFailedPrecondition, "another thread is connecting again", Reason::kBusy);
    }
    coming_back_ = true;
    if (lost_.ok()) Lose(Status(Code::kCancelled, "connecting again", Reason::kCancelled));
  }
  Result<wire::Registered> registered = ComeBack(deadline, stop);
  MutexLock lock(mutex_);
  coming_back_ = reconnecting_ = false;
  // Half a conversation is none: nobody reads the memory, and the next attempt begins from here.
  if (!registered.ok() && lost_.ok()) Lose(registered.status());
  changed_.NotifyAll();
  return registered;
}

Result<wire::Registered> Client::ComeBack(TimePoint deadline, const std::function<bool()>& stop) {
  wire::Register message;
  std::vector<OwnedSegment> segments;
  {
    MutexLock lock(mutex_);
    // A thread that was reading the old socket lets go of it first.
    while (reading_) {
      if (!changed_.WaitUntil(mutex_, deadline) && Now() >= deadline) {
        return Status(Code::kDeadlineExceeded, "another thread is still in a hook");
      }
    }
    buckets_.DropBuckets();
    message = *registration_;
    segments = registered_segments_;
  }
  TB_RETURN_IF_ERROR(OpenOnceThere(deadline, stop));
  return SendRegistration(std::move(message), std::move(segments), deadline, /*returns=*/true);
}

// Between two attempts nobody is told anything, and a thread that wants to write does not wait.
Status Client::OpenOnceThere(TimePoint deadline, const std::function<bool()>& stop) {
  const auto connecting = [this](bool begins) {
    MutexLock lock(mutex_);
    reconnecting_ = begins;
    changed_.NotifyAll();
  };
  while (true) {
    connecting(true);
    const Status opened = Open(deadline);
    // One that is ending may still take a connection, to close it.
    if (opened.code() != Code::kUnavailable) return opened;
    connecting(false);
    if (stop && stop()) {
      return {Code::kCancelled, "stopped before an agent was there", Reason::kCancelled};
    }
    if (!PauseBefore(deadline)) return opened;
  }
}

}  // namespace tensorbus::worker_shim
