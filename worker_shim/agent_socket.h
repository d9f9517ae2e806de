#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::worker_shim {

/// Where an agent listens unless somebody says otherwise: $TENSORBUS_AGENT_SOCKET, else in the
/// runtime folder: $TENSORBUS_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tensorbus, else
/// /tmp/tensorbus-UID.
std::string DefaultAgentSocket();

/// What to say when whoever listens at `path` gave no welcome but failed with `why`: what listens
/// there may be no agent, and where agents usually listen.
///
/// Always a failure: kInvalidArgument when what came is none of an agent's words, else `why`'s code
/// and reason.
Status NoWelcome(const std::string& path, const Status& why);

/// The agent at the other end, as the kernel knows it.
struct AgentProcess {
  UniqueFd socket;
  pid_t pid = 0;
};

/// Connects to the agent's socket and checks whose it is: `uid` if given, else ours or root's.
///
/// Errors: kUnavailable/kNotRunning when nobody listens there; kPermissionDenied when the socket
/// may not be opened or belongs to somebody else; kDeadlineExceeded; kInvalidArgument for an
/// impossible path. Each says what to do.
Result<AgentProcess> ConnectToAgent(const std::string& path, std::optional<uid_t> uid,
                                    TimePoint deadline);

}  // namespace tensorbus::worker_shim
