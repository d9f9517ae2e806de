#include "agent/local_socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tensorbus/rpc/address.h"

namespace tensorbus::agent {
namespace {

constexpr int kBacklog = 128;

Result<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Status(Code::kInvalidArgument,
                  fmt::format("socket path \"{}\" has {} bytes; 1 to {} fit, choose a shorter one",
                              path, path.size(), sizeof address.sun_path - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

UniqueFd NewSocket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Whoever may swap the socket could answer workers in the agent's name.
Status CheckFolder(const std::string& folder) {
  struct stat link = {};
  struct stat info = {};
  if (::lstat(folder.c_str(), &link) != 0 || ::stat(folder.c_str(), &info) != 0) {
    return ErrnoStatus(errno, fmt::format("cannot look at the socket's folder {}", folder));
  }
  const auto trusted = [](uid_t uid) { return uid == ::geteuid() || uid == 0; };
  if (!trusted(link.st_uid) || !trusted(info.st_uid)) {
    return {Code::kPermissionDenied,
            fmt::format("the socket's folder {} belongs to user {}, not to us ({}); choose another "
                        "one with --socket or TENSORBUS_RUNTIME_DIR",
                        folder, trusted(link.st_uid) ? info.st_uid : link.st_uid, ::geteuid())};
  }
  if ((info.st_mode & 0022) != 0 && (info.st_mode & S_ISVTX) == 0) {
    return {Code::kPermissionDenied,
            fmt::format("others may write to the socket's folder {} (mode {:o}); run: chmod 700 {}",
                        folder, info.st_mode & 07777, folder)};
  }
  return {};
}

Status MakeFolder(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  if (folder.empty()) return {};
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(folder).parent_path(), error);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, fmt::format("cannot make the socket's folder {}", folder));
  }
  return CheckFolder(folder);
}

// A socket file without a listener is what a killed agent leaves behind.
Status RemoveStale(const std::string& path, const sockaddr_un& address) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? Status() : ErrnoStatus(errno, fmt::format("cannot look at {}", path));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return {Code::kAlreadyExists, fmt::format("{} exists and is not a socket", path)};
  }
  const UniqueFd probe = NewSocket();
  if (!probe.valid()) return ErrnoStatus(errno, "socket");
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
      errno == EAGAIN || errno == EINPROGRESS) {
    return {Code::kAlreadyExists,
            fmt::format("another agent listens at {}; stop it or give this one another --socket",
                        path)};
  }
  if (errno != ECONNREFUSED) {
    return ErrnoStatus(errno, fmt::format("{} exists and cannot be asked who listens", path));
  }
  if (::unlink(path.c_str()) != 0) {
    return ErrnoStatus(errno, fmt::format("cannot remove the stale socket {}", path));
  }
  return {};
}

}  // namespace

std::string DefaultSocketPath() {
  return rpc::DefaultRuntimeDir() + "/agent.sock";
}

Result<LocalListener> LocalListener::Create(const std::string& path, bool shared) {
  TB_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  TB_RETURN_IF_ERROR(MakeFolder(path));
  TB_RETURN_IF_ERROR(RemoveStale(path, address));
  UniqueFd fd = NewSocket();
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  // Set before bind, so that the file never exists with wider permissions.
  if (::fchmod(fd.get(), shared ? 0666 : 0600) != 0) return ErrnoStatus(errno, "fchmod");
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return ErrnoStatus(errno, fmt::format("cannot make the socket {}", path));
  }
  LocalListener listener(std::move(fd), path);
  // The umask may have taken bits away.
  if (::chmod(path.c_str(), shared ? 0666 : 0600) != 0) {
    return ErrnoStatus(errno, fmt::format("cannot set the permissions of {}", path));
  }
  if (::listen(listener.fd(), kBacklog) != 0) {
    return ErrnoStatus(errno, fmt::format("cannot listen at {}", path));
  }
  return listener;
}

LocalListener::LocalListener(LocalListener&& other) noexcept
    : fd_(std::move(other.fd_)), path_(std::exchange(other.path_, {})) {}

LocalListener::~LocalListener() {
  if (fd_.valid() && !path_.empty()) ::unlink(path_.c_str());
}

Result<PeerProcess> PeerOf(int socket) {
  ucred credentials = {};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return ErrnoStatus(errno, "SO_PEERCRED");
  }
  return PeerProcess{.pid = credentials.pid, .uid = credentials.uid};
}

Status CheckPeer(const PeerProcess& peer, uid_t own_uid, const std::vector<uid_t>& allowed) {
  if (peer.uid == own_uid || peer.uid == 0) return {};
  if (std::find(allowed.begin(), allowed.end(), peer.uid) != allowed.end()) return {};
  return {
      Code::kPermissionDenied,
      fmt::format("process {} runs as uid {}, this agent as uid {}; start the agent as the same "
                  "user or with --allow-uid {}",
                  peer.pid, peer.uid, own_uid, peer.uid)};
}

}  // namespace tensorbus::agent
