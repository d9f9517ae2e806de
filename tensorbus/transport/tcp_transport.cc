#include "tensorbus/transport/tcp_transport.h"

#include <atomic>
#include <chrono>
#include <fmt/format.h>
#include <map>
#include <set>
#include <sys/epoll.h>
#include <utility>
#include <vector>

#include "tensorbus/base/executor.h"
#include "tensorbus/base/log.h"
#include "tensorbus/transport/route_check.h"
#include "tensorbus/transport/tcp_source.h"
#include "tensorbus/transport/tcp_target.h"

namespace tensorbus::transport {

using tcp::Address;
using tcp::Peer;
using tcp::SourceConnection;
using tcp::TcpPull;

namespace {

/// How long no connection is accepted after the system ran out of descriptors.
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

Status CheckOptions(const TcpOptions& options) {
  const auto bad = [](const char* what) {
    return Status(Code::kInvalidArgument, std::string("tcp transport: ") + what);
  };
  if (options.token.empty() && !options.token_source) return bad("the shared token is missing");
  if (options.io_threads == 0 || options.streams_per_peer == 0) return bad("no threads or streams");
  if (options.window_bytes == 0 || options.window_bytes > tcp::kWindowBytesMax) {
    return bad("windows must have 1 byte to 64 MiB");
  }
  if (options.credit_bytes == 0 || options.scratch_bytes == 0) return bad("a bound of 0 bytes");
  return {};
}

/// Hands accepted connections to the loops in turn. Lives on the first loop.
class Listener final : public IoHandler, public std::enable_shared_from_this<Listener> {
 public:
  Listener(const std::vector<std::unique_ptr<IoLoop>>& loops, tcp::SourceContext& context,
           UniqueFd fd)
      : loops_(loops), context_(context), fd_(std::move(fd)) {}

  void Start() {
    const Status status = loops_[0]->Watch(fd_.get(), EPOLLIN, shared_from_this());
    if (!status.ok()) Log(LogLevel::kError, "tcp_listen_failed", {{"error", status}});
  }

  void OnReady(std::uint32_t) override {
    for (;;) {
      Result<std::optional<UniqueFd>> accepted = tcp::Accept(fd_.get());
      if (!accepted.ok()) return Pause(accepted.status());
      if (!accepted->has_value()) return;
      if (context_.connections.load() >= context_.options.connections_max) {
        context_.log.Write(
            "tcp_connection_refused",
            Status(Code::kResourceExhausted,
                   fmt::format("{} connections are open already", context_.options.connections_max),
                   Reason::kBusy));
        continue;  // closes it
      }
      IoLoop& loop = *loops_[next_++ % loops_.size()];
      const auto connection =
          std::make_shared<SourceConnection>(loop, context_, std::move(**accepted));
      loop.Post([connection] { connection->Start(); });
    }
  }

 private:
  void Pause(const Status& why) {
    Log(LogLevel::kWarn, "tcp_accept_paused", {{"error", why}});
    loops_[0]->Rewatch(fd_.get(), 0);
    loops_[0]->RunAt(std::chrono::steady_clock::now() + kAcceptPause, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->loops_[0]->Rewatch(self->fd_.get(), EPOLLIN);
    });
  }

  const std::vector<std::unique_ptr<IoLoop>>& loops_;
  tcp::SourceContext& context_;
  const UniqueFd fd_;
  std::size_t next_ = 0;
};

}  // namespace

/// Everything the threads share. Members are destroyed after the loops have joined.
class TcpTransport::Impl {
 public:
  Impl(TcpOptions options, StagingBudget::Lease lease)
      : options_(std::move(options)), lease_(std::move(lease)) {}
  ~Impl() { Stop(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Status Start(const Address& address);
  void Stop();
  void Pull(const RouteKey& key, RouteEnd target, PullOptions pull_options, Done done);
  void Cancel(SessionId session);

  const std::string& endpoint() const { return endpoint_; }
  ExposureTable& exposures() { return exposures_; }
  std::size_t peer_count() const;

 private:
  std::shared_ptr<Peer> FindPeer(const std::string& endpoint, const Address& address);
  /// Makes room for one more peer by closing those that were idle longest.
  void ForgetPeers() TB_REQUIRES(mutex_);
  /// Begins a pull; on the first loop.
  void Begin(const std::shared_ptr<TcpPull>& pull);
  /// Runs Done if the pull is over. On any loop.
  void Finish(const std::shared_ptr<TcpPull>& pull);
  void Offload(std::function<void()> task) {
    waiters_[next_waiter_++ % waiters_.size()]->Post(std::move(task));
  }

  const TcpOptions options_;
  const StagingBudget::Lease lease_;
  ExposureTable exposures_;
  tcp::SourceContext source_{
      .options = options_, .exposures = exposures_, .offload = [this](std::function<void()> task) {
        Offload(std::move(task));
      }};
  tcp::TargetContext target_{
      .options = options_,
      .finish = [this](const std::shared_ptr<TcpPull>& pull) { Finish(pull); },
      .offload = [this](std::function<void()> task) { Offload(std::move(task)); }};
  std::string endpoint_;
  mutable Mutex mutex_;
  struct KnownPeer {
    std::shared_ptr<Peer> peer;  ///< nobody else refers to it unless something is pulled from it
    std::uint64_t last_use = 0;
  };
  std::map<std::string, KnownPeer> peers_ TB_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Peer>> forgotten_ TB_GUARDED_BY(mutex_);  ///< are closing
  std::uint64_t uses_ TB_GUARDED_BY(mutex_) = 0;
  std::set<std::shared_ptr<TcpPull>> pulls_ TB_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<IoLoop>> loops_;
  /// Threads that wait for foreign memory in the loops' place.
  std::vector<std::unique_ptr<ThreadExecutor>> waiters_;
  std::atomic<std::size_t> next_waiter_{0};
};

Status TcpTransport::Impl::Start(const Address& address) {
  TB_ASSIGN_OR_RETURN(UniqueFd listener, tcp::Listen(address));
  TB_ASSIGN_OR_RETURN(const std::uint16_t port, tcp::LocalPort(listener.get()));
  const std::string& host =
      options_.advertise_host.empty() ? address.host : options_.advertise_host;
  endpoint_ = "tcp://" + Address{.host = host, .port = port}.ToString();
  for (unsigned i = 0; i < options_.io_threads; ++i) {
    TB_ASSIGN_OR_RETURN(auto loop,
                        IoLoop::Create(fmt::format("tb-tcp-{}", i),
                                       static_cast<std::size_t>(options_.scratch_bytes)));
    loops_.push_back(std::move(loop));
    waiters_.push_back(std::make_unique<ThreadExecutor>(fmt::format("tb-tcp-wait-{}", i)));
  }
  const auto accepting = std::make_shared<Listener>(loops_, source_, std::move(listener));
  loops_[0]->Post([accepting] { accepting->Start(); });
  return {};
}

void TcpTransport::Impl::Stop() {
  if (loops_.empty()) return;
  std::map<std::string, KnownPeer> peers;
  std::set<std::shared_ptr<TcpPull>> pulls;
  {
    const MutexLock lock(mutex_);
    peers = peers_;
    pulls = pulls_;
  }
  for (const auto& [endpoint, known] : peers) known.peer->Shutdown();
  for (const auto& pull : pulls) {
    pull->state.Cancel();
    // Whoever is inside on another loop calls Finish() itself when it leaves.
    loops_[0]->Post([this, pull] { Finish(pull); });
  }
  for (const auto& loop : loops_) loop->Stop();
  for (const auto& waiter : waiters_) waiter->Stop();
}

std::shared_ptr<Peer> TcpTransport::Impl::FindPeer(const std::string& endpoint,
                                                   const Address& address) {
  const MutexLock lock(mutex_);
  if (!peers_.contains(endpoint)) ForgetPeers();
  KnownPeer& known = peers_[endpoint];
  if (known.peer == nullptr) {
    known.peer = std::make_shared<Peer>(endpoint, address, target_, loops_);
  }
  known.last_use = ++uses_;
  return known.peer;
}

void TcpTransport::Impl::ForgetPeers() {
  std::erase_if(forgotten_, [](const auto& peer) { return peer->closed(); });
  while (peers_.size() >= options_.peers_max) {
    auto oldest = peers_.end();
    for (auto it = peers_.begin(); it != peers_.end(); ++it) {
      // New references come from FindPeer() only, which holds the same lock.
      const bool idle = it->second.peer.use_count() == 1;
      if (idle && (oldest == peers_.end() || it->second.last_use < oldest->second.last_use)) {
        oldest = it;
      }
    }
    if (oldest == peers_.end()) return;
    oldest->second.peer->Shutdown();
    forgotten_.push_back(std::move(oldest->second.peer));
    peers_.erase(oldest);
  }
}

std::size_t TcpTransport::Impl::peer_count() const {
  const MutexLock lock(mutex_);
  return peers_.size();
}

void TcpTransport::Impl::Pull(const RouteKey& key, RouteEnd target, PullOptions pull_options,
                              Done done) {
  if (pull_options.peer.empty()) pull_options.peer = endpoint_;
  Status status = CheckEnd(target).Annotate(RouteName(key));
  const std::string peer = pull_options.peer;
  const Result<Address> address = tcp::ParseAddress(peer);
  if (status.ok()) status = address.status().Annotate(RouteName(key));
  const auto pull =
      std::make_shared<TcpPull>(key, std::move(target), std::move(pull_options), std::move(done));
  if (status.ok()) {
    pull->peer = FindPeer(peer, *address);
  } else {
    pull->state.Fail(std::move(status));
  }
  {
    const MutexLock lock(mutex_);
    pulls_.insert(pull);
  }
  loops_[0]->Post([this, pull] { Begin(pull); });
}

void TcpTransport::Impl::Begin(const std::shared_ptr<TcpPull>& pull) {
  pull->state.CheckDeadline(std::chrono::steady_clock::now());
  if (pull->state.failed()) return Finish(pull);
  if (pull->state.options().deadline != TimePoint::max()) {
    pull->timer = loops_[0]->RunAt(pull->state.options().deadline,
                                   [this, weak = std::weak_ptr<TcpPull>(pull)] {
                                     if (const auto late = weak.lock()) {
                                       late->state.CheckDeadline(std::chrono::steady_clock::now());
                                       Finish(late);
                                     }
                                   });
  }
  pull->peer->Add(pull);
  pull->peer->Wake();
}

void TcpTransport::Impl::Finish(const std::shared_ptr<TcpPull>& pull) {
  // A route without bytes is complete from the start, but the source has to agree.
  if (!pull->state.failed() && !pull->confirmed.load()) return;
  if (!pull->state.over()) return;
  {
    const MutexLock lock(mutex_);
    if (pulls_.erase(pull) == 0) return;
  }
  if (pull->peer != nullptr) pull->peer->Remove(pull);
  loops_[0]->Post([this, pull] {
    if (pull->timer.has_value()) loops_[0]->CancelTimer(*pull->timer);
  });
  pull->state.Report();
}

void TcpTransport::Impl::Cancel(SessionId session) {
  const MutexLock lock(mutex_);
  for (const auto& pull : pulls_) {
    if (pull->state.key().session != session) continue;
    pull->state.Cancel();
    loops_[0]->Post([this, pull] { Finish(pull); });
  }
}

Result<std::unique_ptr<TcpTransport>> TcpTransport::Create(TcpOptions options) {
  TB_RETURN_IF_ERROR(CheckOptions(options));
  TB_ASSIGN_OR_RETURN(const Address address, tcp::ParseAddress(options.listen));
  if (options.staging == nullptr) options.staging = StagingBudget::Create();
  auto lease = options.staging->TryAcquire(options.io_threads * options.scratch_bytes);
  if (!lease.ok()) return lease.status().Annotate("scratch of the tcp transport");
  auto impl = std::make_unique<Impl>(std::move(options), std::move(*lease));
  TB_RETURN_IF_ERROR(impl->Start(address));
  return std::unique_ptr<TcpTransport>(new TcpTransport(std::move(impl)));
}

TcpTransport::TcpTransport(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TcpTransport::~TcpTransport() = default;

std::string TcpTransport::endpoint() const {
  return impl_->endpoint();
}

std::size_t TcpTransport::peer_count() const {
  return impl_->peer_count();
}

Status TcpTransport::Expose(const RouteKey& key, RouteEnd source) {
  return impl_->exposures().Add(key, std::move(source));
}

void TcpTransport::Withdraw(const RouteKey& key) {
  impl_->exposures().Remove(key);
}

void TcpTransport::Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) {
  impl_->Pull(key, std::move(target), std::move(options), std::move(done));
}

void TcpTransport::Cancel(SessionId session) {
  impl_->Cancel(session);
}

}  // namespace tensorbus::transport
