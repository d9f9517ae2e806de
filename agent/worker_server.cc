#include "agent/worker_server.h"

#include <array>
#include <cerrno>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unordered_set>
#include <utility>

#include "tensorbus/base/log.h"

namespace tensorbus::agent {
namespace {

constexpr std::uint64_t kListenerToken = 0;
constexpr std::uint64_t kWakeToken = 1;
constexpr Nanos kCloseGrace = std::chrono::seconds(1);
constexpr int kTickMs = 250;
/// After accept() failed for lack of descriptors or memory: the listener stays readable, and asking
/// again at once would fail at once.
constexpr Nanos kAcceptPause = std::chrono::milliseconds(100);
/// How long the kernel may need between closing a dying process's socket and declaring it dead.
constexpr int kDeathGraceMs = 5;

std::uint64_t SocketToken(ConnectionId id) {
  return id.value << 1;
}
std::uint64_t ProcessToken(ConnectionId id) {
  return id.value << 1 | 1;
}

UniqueFd OpenPidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

Status Overrun(std::string what) {
  return {Code::kResourceExhausted, std::move(what), Reason::kBusy};
}

bool HasEnded(const UniqueFd& pidfd, int wait_ms) {
  if (!pidfd.valid()) return false;
  pollfd item = {pidfd.get(), POLLIN, 0};
  return ::poll(&item, 1, wait_ms) == 1;
}

}  // namespace

LastFrame MakeLastFrame(bool awaits_welcome, const Status& why) {
  if (!awaits_welcome) return {wire::MessageType::kBrokenOff, wire::Encode(wire::Reply{why})};
  wire::Welcome refusal;
  refusal.status = why;
  return {wire::MessageType::kWelcome, wire::Encode(refusal)};
}

/// What other threads ask of the server's thread.
struct WorkerServer::Order {
  enum class What { kSend, kClose, kOverrun, kHandled, kStop };
  What what = What::kSend;
  ConnectionId connection;
  wire::MessageType type = wire::MessageType::kPing;
  std::uint64_t request = 0;
  std::vector<std::byte> body;
  std::vector<UniqueFd> fds;
  std::string why;
};

/// Shared between the server and tasks on the executor, which may outlive it.
struct WorkerServer::Shared {
  Mutex mutex;
  std::vector<Order> orders TB_GUARDED_BY(mutex);
  std::size_t waiting_frames TB_GUARDED_BY(mutex) = 0;
  std::uint64_t waiting_bytes TB_GUARDED_BY(mutex) = 0;
  std::unordered_set<std::uint64_t> overrun TB_GUARDED_BY(mutex);  ///< told already
  std::size_t waiting_frames_max = 0;
  std::uint64_t waiting_bytes_max = 0;
  UniqueFd wake;
  Handler handler;
  /// Set by Stop(): the server's thread ends, and tasks that are still on the executor do nothing.
  /// Carries no data; whoever stops the server drains the executor after it.
  std::atomic<bool> stopped{false};

  void Add(Order order) {
    MutexLock lock(mutex);
    if (order.what == Order::What::kSend) {
      if (overrun.contains(order.connection.value)) return;
      if (waiting_frames >= waiting_frames_max ||
          waiting_bytes + order.body.size() > waiting_bytes_max) {
        overrun.insert(order.connection.value);
        order.what = Order::What::kOverrun;
        order.body.clear();
        order.fds.clear();
      } else {
        ++waiting_frames;
        waiting_bytes += order.body.size();
      }
    }
    orders.push_back(std::move(order));
    if (orders.size() == 1) Wake();
  }
  std::vector<Order> Take() {
    MutexLock lock(mutex);
    waiting_frames = 0;
    waiting_bytes = 0;
    overrun.clear();
    return std::exchange(orders, {});
  }
  void Wake() const {
    const std::uint64_t one = 1;
    // Only a full counter can refuse, and that wakes as well.
    [[maybe_unused]] const ssize_t written = ::write(wake.get(), &one, sizeof one);
  }
};

struct WorkerServer::Connection {
  ConnectionId id;
  PeerProcess peer;
  UniqueFd socket;
  UniqueFd pidfd;
  wire::FrameReader reader;
  wire::FrameWriter writer;
  std::uint32_t unhandled_frames = 0;
  bool greeted = false;
  bool closing = false;
  std::string close_why;
  TimePoint deadline;  ///< for the first frame, then for the last bytes of a close
  std::uint32_t watched = 0;
};

Result<std::unique_ptr<WorkerServer>> WorkerServer::Create(Options options, Executor& executor,
                                                           Handler handler) {
  TB_ASSIGN_OR_RETURN(LocalListener listener,
                      LocalListener::Create(options.socket_path, !options.allow_uids.empty()));
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll.valid() || !wake.valid()) return ErrnoStatus(errno, "epoll");
  for (const auto& [fd, token] :
       {std::pair(listener.fd(), kListenerToken), std::pair(wake.get(), kWakeToken)}) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = token;
    if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return ErrnoStatus(errno, "epoll_ctl");
    }
  }
  return std::unique_ptr<WorkerServer>(new WorkerServer(std::move(options), executor,
                                                        std::move(handler), std::move(listener),
                                                        std::move(epoll), std::move(wake)));
}

WorkerServer::WorkerServer(Options options, Executor& executor, Handler handler,
                           LocalListener listener, UniqueFd epoll, UniqueFd wake)
    : options_(std::move(options)),
      executor_(executor),
      shared_(std::make_shared<Shared>()),
      listener_(std::move(listener)),
      epoll_(std::move(epoll)) {
  shared_->wake = std::move(wake);
  shared_->handler = std::move(handler);
  shared_->waiting_frames_max = options_.waiting_frames_max;
  shared_->waiting_bytes_max = options_.waiting_bytes_max;
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "tb-workers");
    Run();
  });
}

WorkerServer::~WorkerServer() {
  Stop();
}

void WorkerServer::Stop() {
  shared_->stopped.store(true);
  if (!thread_.joinable()) return;
  Order order;
  order.what = Order::What::kStop;
  shared_->Add(std::move(order));
  thread_.join();
  const Status why(Code::kUnavailable, "the agent was stopped", Reason::kPeerLost);
  for (const auto& [key, connection] : connections_) TellWhy(*connection, why);
  connections_.clear();
}

void WorkerServer::Send(ConnectionId connection, wire::MessageType type, std::uint64_t request,
                        std::vector<std::byte> body, std::vector<UniqueFd> fds) {
  Order order;
  order.connection = connection;
  order.type = type;
  order.request = request;
  order.body = std::move(body);
  order.fds = std::move(fds);
  shared_->Add(std::move(order));
}

void WorkerServer::Close(ConnectionId connection, std::string why) {
  Order order;
  order.what = Order::What::kClose;
  order.connection = connection;
  order.why = std::move(why);
  shared_->Add(std::move(order));
}

void WorkerServer::Run() {
  std::array<epoll_event, 64> events = {};
  while (!shared_->stopped.load()) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), kTickMs);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      const std::uint64_t token = event.data.u64;
      if (token == kListenerToken) {
        Accept();
        continue;
      }
      if (token == kWakeToken) {
        std::uint64_t drained = 0;
        [[maybe_unused]] const ssize_t got = ::read(shared_->wake.get(), &drained, sizeof drained);
        TakeOrders();
        continue;
      }
      const auto found = connections_.find(token >> 1);
      if (found == connections_.end()) continue;  // dropped by an earlier event of this round
      Connection& connection = *found->second;
      if ((token & 1) != 0) {
        ProcessEnded(connection);
        continue;
      }
      if ((event.events & (EPOLLOUT | EPOLLERR)) != 0) Flush(connection);
      if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 &&
          connections_.contains(token >> 1)) {
        Read(connection);
      }
    }
    DropLate();
    ResumeAccepting();
  }
}

void WorkerServer::TakeOrders() {
  for (Order& order : shared_->Take()) {
    const auto found = connections_.find(order.connection.value);
    if (found == connections_.end()) continue;
    Connection& connection = *found->second;
    switch (order.what) {
      case Order::What::kSend: {
        if (connection.closing) break;
        const Status added = connection.writer.Add(order.type, order.request, std::move(order.body),
                                                   std::move(order.fds));
        if (!added.ok()) {
          BreakOff(connection, added);
        } else if (connection.writer.queued_bytes() > options_.outbound_bytes_max) {
          BreakOff(connection,
                   Overrun(fmt::format("worker process {} did not read {} bytes sent to it",
                                       connection.peer.pid, connection.writer.queued_bytes())));
        } else {
          Flush(connection);
        }
        break;
      }
      case Order::What::kClose:
        connection.closing = true;
        connection.close_why = std::move(order.why);
        connection.deadline = std::chrono::steady_clock::now() + kCloseGrace;
        Flush(connection);
        break;
      case Order::What::kOverrun:
        if (connection.closing) break;
        BreakOff(connection,
                 Overrun(fmt::format("more frames wait for the workers than the {} with {} bytes "
                                     "that are kept",
                                     options_.waiting_frames_max, options_.waiting_bytes_max)));
        break;
      case Order::What::kHandled:
        --connection.unhandled_frames;
        Watch(connection);
        break;
      case Order::What::kStop:
        break;
    }
  }
}

void WorkerServer::Accept() {
  for (;;) {
    UniqueFd socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN) PauseAccepting(ErrnoStatus(errno, "accept"));
      return;
    }
    Admit(std::move(socket));
  }
}

void WorkerServer::PauseAccepting(const Status& why) {
  Log(LogLevel::kWarn, "worker_accept_paused", {{"error", why}});
  epoll_event event = {};
  event.data.u64 = kListenerToken;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.fd(), &event) != 0) {
    return Log(LogLevel::kError, "worker_accept_not_paused",
               {{"error", ErrnoStatus(errno, "epoll_ctl")}});
  }
  accept_again_ = std::chrono::steady_clock::now() + kAcceptPause;
}

void WorkerServer::ResumeAccepting() {
  if (!accept_again_.has_value() || std::chrono::steady_clock::now() < *accept_again_) return;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kListenerToken;
  // Tried again at the next tick if it fails.
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.fd(), &event) == 0) accept_again_.reset();
}

Status WorkerServer::CheckAdmitted(const Result<PeerProcess>& peer) const {
  TB_RETURN_IF_ERROR(peer.status());
  TB_RETURN_IF_ERROR(CheckPeer(*peer, ::getuid(), options_.allow_uids));
  if (connections_.size() < options_.connection_count_max) return {};
  return {Code::kResourceExhausted,
          fmt::format("this agent serves {} connections already", connections_.size()),
          Reason::kBusy};
}

// Says why before it hangs up, in the words a worker library expects first: a Welcome.
void WorkerServer::Refuse(const UniqueFd& socket, const Status& why) const {
  Log(LogLevel::kWarn, "worker_refused", {{"error", why}});
  wire::FrameWriter writer;
  LastFrame last = MakeLastFrame(true, why);
  if (writer.Add(last.type, 0, std::move(last.body)).ok()) {
    [[maybe_unused]] const auto flushed = writer.Flush(socket.get());
  }
}

Status WorkerServer::WatchNew(int fd, std::uint64_t token) const {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return {};
  return ErrnoStatus(errno, "this agent cannot watch one more worker");
}

// A worker whose death could go unnoticed is not let in.
void WorkerServer::Admit(UniqueFd socket) {
  const Result<PeerProcess> peer = PeerOf(socket.get());
  if (const Status admitted = CheckAdmitted(peer); !admitted.ok()) return Refuse(socket, admitted);
  auto connection = std::make_unique<Connection>();
  connection->id = ConnectionId{next_connection_++};
  connection->peer = *peer;
  connection->pidfd = OpenPidfd(peer->pid);
  const bool gone = !connection->pidfd.valid() && errno == ESRCH;
  if (!connection->pidfd.valid() && !gone) {
    return Refuse(socket, ErrnoStatus(errno, fmt::format("cannot watch process {}", peer->pid)));
  }
  Status watched = WatchNew(socket.get(), SocketToken(connection->id));
  if (watched.ok() && !gone) {
    watched = WatchNew(connection->pidfd.get(), ProcessToken(connection->id));
  }
  if (!watched.ok()) return Refuse(socket, watched);
  connection->watched = EPOLLIN;
  connection->deadline = std::chrono::steady_clock::now() + options_.hello_timeout;
  connection->socket = std::move(socket);
  Connection& kept = *connection;
  connections_.emplace(kept.id.value, std::move(connection));
  executor_.Post([shared = shared_, id = kept.id, process = kept.peer] {
    if (!shared->stopped.load()) shared->handler.on_open(id, process);
  });
  if (gone) ProcessEnded(kept);  // before we could watch it; its socket may live on in a child
}

void WorkerServer::ProcessEnded(Connection& connection) {
  const ConnectionId id = connection.id;
  Read(connection);  // what it said before it ended still counts
  if (connections_.contains(id.value)) Drop(id, WhyEnded(connection, {}));
}

void WorkerServer::Read(Connection& connection) {
  while (!connection.closing && connection.unhandled_frames < options_.inbound_frames_max) {
    Result<std::optional<wire::Frame>> frame = connection.reader.Read(connection.socket.get());
    if (frame.status().reason() == Reason::kMalformed) {
      return BreakOff(connection,
                      frame.status().Annotate(fmt::format("worker process {} broke the protocol",
                                                          connection.peer.pid)));
    }
    if (!frame.ok()) return Drop(connection.id, WhyEnded(connection, frame.status()));
    if (!frame->has_value()) break;
    Deliver(connection, *std::move(*frame));
  }
  Watch(connection);
}

void WorkerServer::Deliver(Connection& connection, wire::Frame frame) {
  connection.greeted = true;
  ++connection.unhandled_frames;
  // std::function wants copyable tasks, and frames own descriptors.
  auto shared_frame = std::make_shared<wire::Frame>(std::move(frame));
  executor_.Post([shared = shared_, id = connection.id, shared_frame] {
    if (shared->stopped.load()) return;
    shared->handler.on_frame(id, std::move(*shared_frame));
    Order handled;
    handled.what = Order::What::kHandled;
    handled.connection = id;
    shared->Add(std::move(handled));
  });
}

void WorkerServer::Flush(Connection& connection) {
  const Result<bool> flushed = connection.writer.Flush(connection.socket.get());
  if (!flushed.ok()) return Drop(connection.id, WhyEnded(connection, flushed.status()));
  if (connection.closing && connection.writer.empty()) {
    return Drop(connection.id, connection.close_why);
  }
  Watch(connection);
}

void WorkerServer::Watch(Connection& connection) {
  std::uint32_t wanted = 0;
  if (!connection.closing && connection.unhandled_frames < options_.inbound_frames_max) {
    wanted |= EPOLLIN;
  }
  if (!connection.writer.empty()) wanted |= EPOLLOUT;
  if (wanted == connection.watched) return;
  connection.watched = wanted;
  epoll_event event = {};
  event.events = wanted;
  event.data.u64 = SocketToken(connection.id);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), &event) == 0) return;
  BreakOff(connection, ErrnoStatus(errno, fmt::format("worker process {} cannot be watched",
                                                      connection.peer.pid)));
}

void WorkerServer::Drop(ConnectionId id, std::string why) {
  if (connections_.erase(id.value) == 0) return;
  executor_.Post([shared = shared_, id, reason = std::move(why)] {
    if (!shared->stopped.load()) shared->handler.on_closed(id, reason);
  });
}

void WorkerServer::BreakOff(Connection& connection, const Status& why) {
  Log(LogLevel::kWarn, "worker_broken_off", {{"pid", connection.peer.pid}, {"error", why}});
  TellWhy(connection, why);
  Drop(connection.id, why.message());
}

// Who has said nothing yet waits for a Welcome.
void WorkerServer::TellWhy(Connection& connection, const Status& why) {
  if (connection.closing) return;  // its last frame is queued or sent
  LastFrame last = MakeLastFrame(!connection.greeted, why);
  if (connection.writer.Add(last.type, 0, std::move(last.body)).ok()) {
    [[maybe_unused]] const auto flushed = connection.writer.Flush(connection.socket.get());
  }
}

void WorkerServer::DropLate() {
  const TimePoint now = std::chrono::steady_clock::now();
  std::vector<Connection*> late;
  for (const auto& [key, connection] : connections_) {
    const bool waits = connection->closing || !connection->greeted;
    if (waits && now >= connection->deadline) late.push_back(connection.get());
  }
  for (Connection* const connection : late) {
    if (connection->closing) {
      Drop(connection->id, connection->close_why);
    } else {
      BreakOff(*connection,
               Status(Code::kDeadlineExceeded,
                      fmt::format("process {} connected and said nothing", connection->peer.pid)));
    }
  }
}

std::string WorkerServer::WhyEnded(const Connection& connection, const Status& status) const {
  if (status.ok() || HasEnded(connection.pidfd, kDeathGraceMs)) {
    return fmt::format("worker process {} ended", connection.peer.pid);
  }
  return fmt::format("worker process {} closed its connection", connection.peer.pid);
}

}  // namespace tensorbus::agent
