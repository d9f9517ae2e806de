#include "tensorbus/rpc/unix_listener.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

#include "tensorbus/base/log.h"
#include "tensorbus/rpc/address.h"

namespace tensorbus::rpc {

struct UnixListener::State {
  std::string path;
  std::vector<uid_t> allow_uids;
  Accepted accepted;
  UniqueFd lock;
  UniqueFd socket;
  UniqueFd wake;  // an eventfd; readable once we stop
  std::thread thread;

  bool Permitted(int fd) const;
  void AcceptOne() const;
  void Run() const;
};

namespace {

constexpr int kBacklog = 128;
/// Pause after an accept that failed for want of descriptors or memory.
constexpr int kAcceptRetryMs = 100;

Result<UniqueFd> TakeLock(const std::string& path) {
  for (;;) {
    UniqueFd lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!lock.valid()) return ErrnoStatus(errno, "opening " + path);
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "locking " + path);
      return Status(Code::kAlreadyExists,
                    fmt::format("another tensorbusd holds {}; stop it first (`tensorbusctl down`), "
                                "or listen elsewhere",
                                path));
    }
    // Its last holder may have removed it after we opened it: then this lock locks nothing.
    struct stat ours = {};
    struct stat there = {};
    if (::fstat(lock.get(), &ours) == 0 && ::stat(path.c_str(), &there) == 0 &&
        ours.st_ino == there.st_ino) {
      return lock;
    }
  }
}

// A socket without a listener is what a killed daemon leaves behind. Anything else is not ours.
Status RemoveStale(const std::string& path) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? Status() : ErrnoStatus(errno, "looking at " + path);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return {Code::kAlreadyExists,
            fmt::format("{} exists and is not a socket; listen elsewhere", path)};
  }
  const Status probed = ProbeSocket(path);
  if (probed.ok()) {
    return {Code::kAlreadyExists,
            fmt::format("another program listens at {}; listen elsewhere", path)};
  }
  if (probed.reason() != Reason::kNotRunning) return probed;
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, "removing " + path);
  return {};
}

Result<UniqueFd> Bind(const std::string& path, bool for_others) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return Status(Code::kInvalidArgument, fmt::format("socket path {} is longer than {} bytes",
                                                      path, sizeof address.sun_path - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  TB_RETURN_IF_ERROR(RemoveStale(path));
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return ErrnoStatus(errno, "binding " + path);
  }
  if (::chmod(path.c_str(), for_others ? 0666 : 0600) != 0) {
    return ErrnoStatus(errno, "chmod " + path);
  }
  if (::listen(fd.get(), kBacklog) != 0) return ErrnoStatus(errno, "listening on " + path);
  return fd;
}

}  // namespace

bool UnixListener::State::Permitted(int fd) const {
  ucred peer = {};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  const bool permitted =
      peer.uid == ::geteuid() || peer.uid == 0 ||
      std::find(allow_uids.begin(), allow_uids.end(), peer.uid) != allow_uids.end();
  if (!permitted) {
    Log(LogLevel::kWarn, "peer_refused",
        {{"socket", path}, {"uid", peer.uid}, {"pid", peer.pid}, {"remedy", "--allow-uid"}});
  }
  return permitted;
}

void UnixListener::State::AcceptOne() const {
  UniqueFd fd(::accept4(socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.valid()) {
    if (Permitted(fd.get())) accepted(std::move(fd));
    return;
  }
  if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
  Log(LogLevel::kError, "accept_failed",
      {{"socket", path}, {"error", ErrnoStatus(errno, "accept")}});
  pollfd stop = {.fd = wake.get(), .events = POLLIN, .revents = 0};
  ::poll(&stop, 1, kAcceptRetryMs);
}

void UnixListener::State::Run() const {
  for (;;) {
    pollfd fds[2] = {{.fd = socket.get(), .events = POLLIN, .revents = 0},
                     {.fd = wake.get(), .events = POLLIN, .revents = 0}};
    if (::poll(fds, 2, -1) < 0 && errno != EINTR) {
      return Log(LogLevel::kError, "accept_stopped",
                 {{"socket", path}, {"error", ErrnoStatus(errno, "poll")}});
    }
    if (fds[1].revents != 0) return;
    if (fds[0].revents != 0) AcceptOne();
  }
}

Result<std::unique_ptr<UnixListener>> UnixListener::Start(const std::string& path,
                                                          const std::vector<uid_t>& allow_uids,
                                                          Accepted accepted) {
  const auto slash = path.rfind('/');
  if (slash != std::string::npos && slash != 0) {
    TB_RETURN_IF_ERROR(EnsurePrivateDir(path.substr(0, slash)));
  }
  auto state = std::make_unique<State>();
  state->path = path;
  state->allow_uids = allow_uids;
  state->accepted = std::move(accepted);
  TB_ASSIGN_OR_RETURN(state->lock, TakeLock(path + ".lock"));
  state->wake.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!state->wake.valid()) return ErrnoStatus(errno, "eventfd");
  TB_ASSIGN_OR_RETURN(state->socket, Bind(path, !allow_uids.empty()));
  state->thread = std::thread([raw = state.get()] {
    pthread_setname_np(pthread_self(), "tb-accept");
    raw->Run();
  });
  return std::unique_ptr<UnixListener>(new UnixListener(std::move(state)));
}

UnixListener::UnixListener(std::unique_ptr<State> state) : state_(std::move(state)) {}

UnixListener::~UnixListener() {
  Stop();
}

void UnixListener::Stop() {
  if (!state_->thread.joinable()) return;
  const std::uint64_t one = 1;
  if (::write(state_->wake.get(), &one, sizeof one) < 0) {
    Log(LogLevel::kWarn, "wake_failed", {{"error", ErrnoStatus(errno, "eventfd write")}});
  }
  state_->thread.join();
  ::unlink(state_->path.c_str());
  ::unlink((state_->path + ".lock").c_str());
  state_->socket.reset();
  state_->lock.reset();
}

}  // namespace tensorbus::rpc
