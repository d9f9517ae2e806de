#include "agent/process_handle.h"

#include <cerrno>
#include <cstdlib>
#include <fmt/format.h>
#include <fstream>
#include <poll.h>
#include <sstream>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tensorbus::agent {
namespace {

/// Field 22 of /proc/PID/stat, or 0. The second field is a name in parentheses that may hold
/// anything, so counting begins after the last parenthesis.
std::uint64_t StartTimeOf(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return 0;
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) {
    if (!(fields >> field)) return 0;
  }
  return std::strtoull(field.c_str(), nullptr, 10);
}

}  // namespace

Result<ProcessHandle> ProcessHandle::Open(pid_t pid, uid_t uid, std::string owner) {
  ProcessHandle handle(pid, std::move(owner));
  handle.start_time_ = StartTimeOf(pid);
  struct stat info = {};
  if (::stat(fmt::format("/proc/{}", pid).c_str(), &info) != 0) return handle.Gone(errno);
  // A process that is not dumpable belongs to root there: reading it will be refused anyway.
  if (info.st_uid != uid && info.st_uid != 0) return handle.Gone(0);
  const auto fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U));
  if (fd < 0 && errno == ESRCH) return handle.Gone(errno);
  handle.pidfd_ = UniqueFd(fd);
  if (handle.start_time_ == 0 || StartTimeOf(pid) != handle.start_time_) return handle.Gone(0);
  return handle;
}

Status ProcessHandle::Check() const {
  if (!pidfd_.valid()) return StartTimeOf(pid_) == start_time_ ? Status() : Gone(0);
  pollfd ready = {.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  int count = 0;
  do {
    count = ::poll(&ready, 1, 0);
  } while (count < 0 && errno == EINTR);
  return count == 0 ? Status() : Gone(0);
}

Status ProcessHandle::Gone(std::int64_t native) const {
  return {Code::kUnavailable, fmt::format("{} (process {}) is gone", owner_, pid_),
          Reason::kPeerLost, native};
}

}  // namespace tensorbus::agent
