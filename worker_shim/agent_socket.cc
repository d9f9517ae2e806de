#include "worker_shim/agent_socket.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "worker_shim/framing.h"

namespace tensorbus::worker_shim {
namespace {

/// Where an agent listens that was not told otherwise.
std::string UsualAgentSocket() {
  // Read once per connection, as getenv goes: nobody should change the environment meanwhile.
  const char* ours = std::getenv("TENSORBUS_RUNTIME_DIR");  // NOLINT(concurrency-mt-unsafe)
  if (ours != nullptr && *ours != '\0') return std::string(ours) + "/agent.sock";
  const char* user = std::getenv("XDG_RUNTIME_DIR");  // NOLINT(concurrency-mt-unsafe)
  if (user != nullptr && *user != '\0') return std::string(user) + "/tensorbus/agent.sock";
  return fmt::format("/tmp/tensorbus-{}/agent.sock", ::getuid());
}

/// To end a message about a socket that need not be an agent's.
std::string WhereAgentsListen(const std::string& path) {
  const std::string usual = UsualAgentSocket();
  if (path == usual) return "";
  return fmt::format(
      "; the agent that `tensorbusctl up` starts listens at {}, another one's socket "
      "is named when connecting or in TENSORBUS_AGENT_SOCKET",
      usual);
}

Status NotAnAgents(const std::string& path, std::string_view why, int error = 0) {
  return {Code::kInvalidArgument,
          fmt::format("{} is not an agent's socket: {}{}", path, why, WhereAgentsListen(path)),
          Reason::kNone, error};
}

Status ConnectFailure(int error, const std::string& path) {
  switch (error) {
    case ENOENT:
    case ECONNREFUSED:
    case ENOTDIR:
      return {Code::kUnavailable,
              fmt::format("no agent listens at {}; start one with `tensorbusctl up`, or set "
                          "TENSORBUS_AGENT_SOCKET to where it listens",
                          path),
              Reason::kNotRunning, error};
    case EACCES:
    case EPERM:
      return {
          Code::kPermissionDenied,
          fmt::format("uid {} may not open the agent's socket {}; start the agent as this user, "
                      "or let it accept this uid with --allow-uid {}",
                      ::geteuid(), path, ::geteuid()),
          Reason::kNone, error};
    case EPROTOTYPE:
    case ENOTSOCK:
      return NotAnAgents(path, "it is no stream socket", error);
    default:
      return ErrnoStatus(error, fmt::format("connecting to the agent at {}", path));
  }
}

}  // namespace

std::string DefaultAgentSocket() {
  const char* chosen = std::getenv("TENSORBUS_AGENT_SOCKET");  // NOLINT(concurrency-mt-unsafe)
  return chosen != nullptr && *chosen != '\0' ? chosen : UsualAgentSocket();
}

Status NoWelcome(const std::string& path, const Status& why) {
  if (why.reason() == Reason::kMalformed) {
    return NotAnAgents(path, "what listens there does not speak the agent's protocol");
  }
  // An agent that is killed or stopped just then behaves so as well.
  const bool late = why.code() == Code::kDeadlineExceeded;
  return {why.code(),
          fmt::format("{} may not be an agent's socket: what listens there {}{}", path,
                      late ? "has not said a word of the agent's protocol in time"
                           : "closed the connection without a word of the agent's protocol",
                      WhereAgentsListen(path)),
          why.reason(), why.native()};
}

Result<AgentProcess> ConnectToAgent(const std::string& path, std::optional<uid_t> uid,
                                    TimePoint deadline) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Status(Code::kInvalidArgument,
                  fmt::format("socket path \"{}\" has {} bytes; 1 to {} fit", path, path.size(),
                              sizeof address.sun_path - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());

  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return ErrnoStatus(errno, "socket");
  // On UNIX sockets connect() is at once done, or refused with EAGAIN while the listener's queue is
  // full; then only asking again helps.
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
         0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ConnectFailure(errno, path);
    if (std::chrono::steady_clock::now() >= deadline) {
      return Status(Code::kDeadlineExceeded,
                    fmt::format("the agent at {} does not accept connections in time", path));
    }
    ::poll(nullptr, 0, 1);
  }

  ucred peer = {};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return ErrnoStatus(errno, "credentials of the agent");
  }
  const bool known = uid.has_value() ? peer.uid == *uid : peer.uid == ::geteuid() || peer.uid == 0;
  if (!known) {
    return Status(Code::kPermissionDenied,
                  fmt::format("the process behind {} runs as uid {}, not as {}; if that is meant, "
                              "say so when connecting (agent_uid)",
                              path, peer.uid, uid.value_or(::geteuid())));
  }
  return AgentProcess{std::move(socket), peer.pid};
}

}  // namespace tensorbus::worker_shim
