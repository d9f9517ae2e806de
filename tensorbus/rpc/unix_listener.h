#pragma once

#include <functional>
#include <memory>
#include <string>
#include <sys/types.h>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::rpc {

/// A listening UNIX socket that hands on connections of permitted users only.
///
/// A lock file next to the socket keeps two daemons from taking each other's place; a socket left
/// behind by one that died is replaced.
///
/// Threads: accepting runs on a thread of its own, which calls `accepted`.
class UnixListener {
 public:
  /// Gets a connected, non-blocking, close-on-exec socket.
  using Accepted = std::function<void(UniqueFd)>;

  /// Errors: kAlreadyExists when somebody listens there; kPermissionDenied for a folder that is not
  /// private; kInvalidArgument for a path too long.
  static Result<std::unique_ptr<UnixListener>> Start(const std::string& path,
                                                     const std::vector<uid_t>& allow_uids,
                                                     Accepted accepted);
  ~UnixListener();
  UnixListener(const UnixListener&) = delete;
  UnixListener& operator=(const UnixListener&) = delete;

  /// Stops accepting, joins, removes the socket. Idempotent.
  void Stop();

 private:
  struct State;
  explicit UnixListener(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tensorbus::rpc
