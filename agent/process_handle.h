#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>

#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::agent {

/// Another process, told apart from a later one that gets the same number. Move-only; Check() is
/// thread-safe.
class ProcessHandle {
 public:
  /// Must be opened while something else shows that `pid` is the process meant: its connection is
  /// open. `owner` names it in messages.
  ///
  /// Errors: kUnavailable/kPeerLost when there is no such process, or it is not `uid`'s.
  static Result<ProcessHandle> Open(pid_t pid, uid_t uid, std::string owner);

  pid_t pid() const { return pid_; }
  const std::string& owner() const { return owner_; }

  /// OK while it lives; what was done to `pid()` between two good checks was done to it. Error:
  /// kUnavailable/kPeerLost.
  Status Check() const;

 private:
  ProcessHandle(pid_t pid, std::string owner) : pid_(pid), owner_(std::move(owner)) {}
  Status Gone(std::int64_t native) const;

  pid_t pid_;
  std::string owner_;
  UniqueFd pidfd_;                ///< invalid where the kernel has none
  std::uint64_t start_time_ = 0;  ///< clock ticks since boot, the second proof
};

}  // namespace tensorbus::agent
