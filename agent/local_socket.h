#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::agent {

/// The process at the other end of a local connection, as the kernel vouches for it.
struct PeerProcess {
  pid_t pid = 0;
  uid_t uid = 0;
};

/// Where the agent listens when nothing else is asked for: in the user's runtime folder.
std::string DefaultSocketPath();

/// A listening UNIX stream socket that removes its file when it dies. Move-only.
class LocalListener {
 public:
  /// Makes the folder (0700) if it is not there, and the socket (0600; 0666 with `shared`, for
  /// callers that check every peer's uid). A file left behind by a dead agent is replaced.
  ///
  /// Errors: kAlreadyExists when somebody listens there, or the file is no socket;
  /// kPermissionDenied; kInvalidArgument for a path that does not fit.
  static Result<LocalListener> Create(const std::string& path, bool shared);

  LocalListener(LocalListener&&) noexcept;
  LocalListener& operator=(LocalListener&&) = delete;
  LocalListener(const LocalListener&) = delete;
  ~LocalListener();

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }

 private:
  LocalListener(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  UniqueFd fd_;
  std::string path_;
};

/// Who is at the other end of `socket` (SO_PEERCRED).
Result<PeerProcess> PeerOf(int socket);

/// OK when the peer runs as `own_uid`, as root, or as one of `allowed`.
Status CheckPeer(const PeerProcess& peer, uid_t own_uid, const std::vector<uid_t>& allowed);

}  // namespace tensorbus::agent
