#include "worker_shim/client.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <new>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "worker_shim/agent_socket.h"
#include "worker_shim/client_internal.h"

namespace tensorbus::worker_shim {
namespace {

using wire::MessageType;

/// A welcome is a status and a name; what another program says first looks like a far longer frame.
constexpr std::uint32_t kFirstFrameMax = 64U << 10;

constexpr std::uint64_t kHelloRequest = 1;

/// For an answer to arrive that the agent gives at a deadline of its own.
constexpr Nanos kAnswerSlack = std::chrono::milliseconds(500);

/// How long before a wait's end the agent is asked what keeps it: it may have to ask the daemon.
constexpr Nanos kExplainLead = std::chrono::milliseconds(500);

/// At least 1: on the wire 0 is no deadline at all.
std::uint64_t Milliseconds(Nanos timeout) {
  const Nanos bounded = std::clamp<Nanos>(timeout, std::chrono::milliseconds(1), kTimeoutMax);
  return static_cast<std::uint64_t>(std::chrono::ceil<std::chrono::milliseconds>(bounded).count());
}

}  // namespace

// ---- life

Client::Client(ConnectOptions options, UniqueFd page_fd, Mapping page)
    : options_(std::move(options)),
      page_fd_(std::move(page_fd)),
      page_(std::move(page)),
      process_(::getpid()),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ended_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  new (page_.data()) wire::ControlPage();
}

Result<std::unique_ptr<Client>> Client::Connect(ConnectOptions options) {
  if (options.agent_socket.empty()) options.agent_socket = DefaultAgentSocket();
  TB_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd("tensorbus-control", wire::kControlPageBytes));
  TB_ASSIGN_OR_RETURN(Mapping page, Mapping::Create(fd.get(), wire::kControlPageBytes,
                                                    Mapping::Access::kReadWrite));
  const TimePoint deadline = After(options.timeout);
  std::unique_ptr<Client> client(new Client(std::move(options), std::move(fd), std::move(page)));
  if (!client->wake_.valid() || !client->ended_.valid()) return ErrnoStatus(errno, "eventfd");
  TB_RETURN_IF_ERROR(client->Open(deadline));
  return client;
}

Client::~Client() {
  if (process_ != ::getpid()) {
    // A forked child has no such thread, and the agent should not hear from it.
    if (service_.joinable()) service_.detach();
    return;
  }
  StopService();
  MutexLock lock(mutex_);
  if (socket_.valid() && writer_.Add(MessageType::kGoodbye, 0, {}).ok()) {
    [[maybe_unused]] const auto flushed = writer_.Flush(socket_.get());
  }
}

// Connects, or connects again: the old socket and everything asked on it are gone by now.
Status Client::Open(TimePoint deadline) {
  TB_ASSIGN_OR_RETURN(AgentProcess agent,
                      ConnectToAgent(options_.agent_socket, options_.agent_uid, deadline));
  wire::FrameWriter writer;
  wire::FrameReader first(kFirstFrameMax);
  std::vector<UniqueFd> fds;
  fds.emplace_back(::fcntl(page_fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!fds[0].valid()) return ErrnoStatus(errno, "duplicating the control page");
  wire::Hello hello;
  hello.identity = options_.identity;
  hello.pid = static_cast<std::uint32_t>(process_);
  hello.library = options_.library;
  TB_RETURN_IF_ERROR(
      writer.Add(MessageType::kHello, kHelloRequest, wire::Encode(hello), std::move(fds)));

  const std::string where = fmt::format("agent at {}", options_.agent_socket);
  // A peer that refuses us may close before it has read everything: its answer counts, not that.
  [[maybe_unused]] const Status sent = wire::FlushBefore(agent.socket.get(), writer, deadline);
  Result<wire::Frame> frame = wire::ReadBefore(agent.socket.get(), first, deadline);
  if (!frame.ok()) return NoWelcome(options_.agent_socket, frame.status());
  if (frame->type == MessageType::kBrokenOff) return BrokenOff(*frame);
  if (frame->type != MessageType::kWelcome) {
    return NoWelcome(options_.agent_socket, Protocol("no welcome"));
  }
  wire::Welcome welcome;
  TB_RETURN_IF_ERROR(Answered(*frame, welcome).Annotate(where));
  TB_RETURN_IF_ERROR(welcome.status.Annotate(where));

  MutexLock lock(mutex_);
  agent_name_ = welcome.agent;
  agent_pid_ = agent.pid;
  socket_ = std::move(agent.socket);
  reader_ = wire::FrameReader();
  writer_ = wire::FrameWriter();
  lost_ = Status();
  agent_knows_ = false;
  // Requests of the connection before may still be waited for: no number comes twice.
  next_request_ = std::max<std::uint64_t>(next_request_, kHelloRequest + 1);
  WatchSocket(!reading_);
  changed_.NotifyAll();
  return {};
}

Status Client::CheckProcess() const {
  if (process_ == ::getpid()) return {};
  return {Code::kFailedPrecondition,
          fmt::format("this connection belongs to process {}; a forked process has to connect on "
                      "its own",
                      process_)};
}

void Client::SetHook(Hook hook) {
  MutexLock lock(mutex_);
  hook_ = std::move(hook);
}

// ---- requests

Result<RequestId> Client::Ask(MessageType type, MessageType answer, std::vector<std::byte> body,
                              std::vector<UniqueFd> fds) {
  TB_RETURN_IF_ERROR(lost_);
  // Segments are bounded by themselves and always waited for.
  if (pending_.size() >= kRequestsMax && type != MessageType::kAttachSegment &&
      type != MessageType::kRegister) {
    return Status(Code::kResourceExhausted,
                  fmt::format("{} requests were not waited for", pending_.size()), Reason::kBusy);
  }
  const RequestId request{next_request_++};
  TB_RETURN_IF_ERROR(SendFrame(type, request.value, std::move(body), std::move(fds)));
  pending_[request.value].answer = answer;
  return request;
}

Status Client::SendFrame(MessageType type, std::uint64_t request, std::vector<std::byte> body,
                         std::vector<UniqueFd> fds) {
  TB_RETURN_IF_ERROR(lost_);
  TB_RETURN_IF_ERROR(writer_.Add(type, request, std::move(body), std::move(fds)));
  const Result<bool> flushed = writer_.Flush(socket_.get());
  if (!flushed.ok()) {
    // What the agent said before it closed may still wait to be read, and says more than this.
    if (!reading_) Pump(TimePoint::min());
    if (lost_.ok()) Lose(LastWord(flushed.status()));
    return lost_;
  }
  // The rest is written by whoever reads.
  if (!*flushed) Signal(wake_);
  return {};
}

Result<RequestId> Client::Publish(const wire::Publish& message) {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  TB_ASSIGN_OR_RETURN(const RequestId request,
                      Ask(MessageType::kPublish, MessageType::kReply, wire::Encode(message)));
  publishing_[request.value] = {.message = message, .write_count = write_count()};
  return request;
}

Result<RequestId> Client::RequestRelease(Version version, Nanos timeout) {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  const wire::RequestRelease message{.version = version, .timeout_ms = Milliseconds(timeout)};
  return Ask(MessageType::kRequestRelease, MessageType::kReleased, wire::Encode(message));
}

Result<RequestId> Client::Update(const wire::Update& message) {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  TB_ASSIGN_OR_RETURN(const RequestId request,
                      Ask(MessageType::kUpdate, MessageType::kUpdated, wire::Encode(message)));
  updates_.push_back(request.value);
  return request;
}

Result<RequestId> Client::CancelUpdate() {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  return Ask(MessageType::kCancelUpdate, MessageType::kReply, {});
}

Result<RequestId> Client::Claim() {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  return Ask(MessageType::kClaim, MessageType::kClaimed, {});
}

// ---- waiting

Result<Outcome> Client::Wait(RequestId request, Nanos timeout) {
  return WaitUntil(request, After(timeout));
}

Result<Outcome> Client::WaitUntil(RequestId request, TimePoint deadline) {
  TB_RETURN_IF_ERROR(CheckProcess());
  const Nanos whole = deadline - Now();
  bool asked = whole < kAskingWait;
  const TimePoint ask_at = deadline - std::min<Nanos>(kExplainLead, whole / 2);
  MutexLock lock(mutex_);
  while (true) {
    const auto found = pending_.find(request.value);
    if (found == pending_.end()) {
      return Status(Code::kNotFound, fmt::format("no request {}", request.value));
    }
    if (found->second.outcome.has_value()) {
      Outcome outcome = *std::move(found->second.outcome);
      pending_.erase(found);
      return outcome;
    }
    if (reading_ && reading_thread_ == std::this_thread::get_id()) {
      return Status(Code::kFailedPrecondition, "a hook may not wait on its own connection");
    }
    const TimePoint now = Now();
    if (now >= deadline) {
      const Status& why = found->second.waits_for;
      return Status(Code::kDeadlineExceeded,
                    fmt::format("{} (the request goes on)",
                                why.ok() ? fmt::format("the agent at {} has not answered yet",
                                                       options_.agent_socket)
                                         : why.message()),
                    why.reason());
    }
    if (!asked && now >= ask_at) {
      asked = true;
      AskExplanation(request.value, found->second);
      continue;  // the connection may be lost now
    }
    const TimePoint until = asked ? deadline : ask_at;
    if (reading_) {
      changed_.WaitUntil(mutex_, until);
    } else {
      Pump(until);
    }
  }
}

// An agent that is gone ends the request itself, and that says why.
void Client::AskExplanation(std::uint64_t request, Pending& pending) {
  pending.waits_for = Status();
  [[maybe_unused]] const Status sent = SendFrame(MessageType::kExplain, request, {});
}

void Client::Explain(RequestId request) {
  if (!CheckProcess().ok()) return;
  MutexLock lock(mutex_);
  const auto found = pending_.find(request.value);
  if (found == pending_.end() || found->second.outcome.has_value()) return;
  AskExplanation(request.value, found->second);
}

bool Client::Done(RequestId request) {
  if (!CheckProcess().ok()) return false;
  MutexLock lock(mutex_);
  const auto found = pending_.find(request.value);
  return found != pending_.end() && found->second.outcome.has_value();
}

void Client::Forget(RequestId request) {
  if (!CheckProcess().ok()) return;
  MutexLock lock(mutex_);
  const auto found = pending_.find(request.value);
  if (found == pending_.end()) return;
  if (found->second.outcome.has_value()) {
    pending_.erase(found);
  } else {
    // Its answer still comes and has to be recognised; HandleAnswer drops it.
    found->second.answer = MessageType::kGoodbye;
  }
}

Status Client::Poll() {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t drained = ::read(ended_.get(), &count, sizeof count);
  if (!reading_ && lost_.ok()) Pump(TimePoint::min());
  return lost_;
}

Result<int> Client::PollFd() {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  if (!epoll_.valid()) {
    UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
    if (!epoll.valid()) return ErrnoStatus(errno, "epoll_create1");
    epoll_event event = {};
    event.events = EPOLLIN;
    if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, ended_.get(), &event) != 0) {
      return ErrnoStatus(errno, "epoll_ctl");
    }
    epoll_ = std::move(epoll);
    WatchSocket(!reading_ && lost_.ok());
  }
  return epoll_.get();
}

// Whoever reads takes the socket out of PollFd() meanwhile: an event loop would spin on it.
void Client::WatchSocket(bool watch) {
  if (!epoll_.valid() || !socket_.valid()) return;
  epoll_event event = {};
  event.events = EPOLLIN;
  ::epoll_ctl(epoll_.get(), watch ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, socket_.get(), &event);
}

void Client::Signal(const UniqueFd& event) const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
}

// ---- writing

// The agent may be reading the memory for an unanswered publish right now, and another one may be
// told what the memory holds.
Status Client::AwaitUnread(TimePoint deadline) {
  while (reconnecting_ || !publishing_.empty()) {
    if (Now() >= deadline) {
      return {Code::kDeadlineExceeded,
              reconnecting_ ? "this process is still connecting to another agent"
                            : fmt::format("the agent has not answered the publish of version {} "
                                          "yet",
                                          publishing_.begin()->second.message.version.value)};
    }
    if (reading_ || reconnecting_) {
      changed_.WaitUntil(mutex_, deadline);
    } else {
      Pump(deadline);
    }
  }
  return {};
}

Result<Nanos> Client::BeforeWrite(Nanos timeout) {
  TB_RETURN_IF_ERROR(CheckProcess());
  const TimePoint begin = Now();
  const TimePoint deadline = begin + std::clamp(timeout, Nanos::zero(), kTimeoutMax);
  Version held;
  {
    MutexLock lock(mutex_);
    if (reading_ && reading_thread_ == std::this_thread::get_id()) {
      return Status(Code::kFailedPrecondition, "a hook may not wait on its own connection");
    }
    TB_RETURN_IF_ERROR(AwaitUnread(deadline));
    held = held_;
    // Without the agent nobody reads the memory, and the next one must not be told that it holds
    // what was published.
    if (!lost_.ok()) held_ = held = Version();
  }
  Status released;
  if (released_version() < held) {
    Result<RequestId> request = RequestRelease(held, deadline - Now());
    released = request.status();
    if (request.ok()) {
      // The agent ends the wait by itself; the little more is for its answer to arrive.
      const Result<Outcome> outcome = WaitUntil(*request, deadline + kAnswerSlack);
      released = outcome.ok() ? outcome->status : outcome.status();
      if (!outcome.ok()) Forget(*request);
    }
  }
  MutexLock lock(mutex_);
  if (!released.ok() && (reconnecting_ || lost_.ok())) {
    return released.Annotate(fmt::format("version {} was not released", held.value));
  }
  page().write_count.fetch_add(1, std::memory_order_acq_rel);
  if (held_ == held) held_ = Version();
  return std::chrono::duration_cast<Nanos>(Now() - begin);
}

// ---- service

Status Client::StartService() {
  TB_RETURN_IF_ERROR(CheckProcess());
  MutexLock lock(mutex_);
  if (service_.joinable()) return {};
  service_stop_ = false;
  service_ = std::thread([this] { RunService(); });
  return {};
}

void Client::StopService() {
  {
    MutexLock lock(mutex_);
    if (!service_.joinable()) return;
    service_stop_ = true;
    changed_.NotifyAll();
    Signal(wake_);
  }
  service_.join();
}

void Client::RunService() {
  ::pthread_setname_np(::pthread_self(), "tb-service");
  MutexLock lock(mutex_);
  while (!service_stop_) {
    if (reading_ || !lost_.ok()) {
      changed_.Wait(mutex_);
    } else {
      Pump(Now() + kPollMax);
    }
  }
}

// ---- state

Status Client::connection() {
  MutexLock lock(mutex_);
  return lost_;
}

std::string Client::agent_name() {
  MutexLock lock(mutex_);
  return agent_name_;
}

const wire::ControlPage& Client::page() const {
  return *std::launder(reinterpret_cast<const wire::ControlPage*>(page_.data()));
}
wire::ControlPage& Client::page() {
  return *std::launder(reinterpret_cast<wire::ControlPage*>(page_.data()));
}
Version Client::released_version() const {
  return Version{page().released_version.load(std::memory_order_acquire)};
}
Version Client::live_version() const {
  if (dirty_.load(std::memory_order_acquire)) return {};
  return Version{page().live_version.load(std::memory_order_acquire)};
}
std::uint64_t Client::write_count() const {
  return page().write_count.load(std::memory_order_acquire);
}

}  // namespace tensorbus::worker_shim
