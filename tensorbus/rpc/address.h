#pragma once

#include <string>
#include <string_view>

#include "tensorbus/base/status.h"
#include "tensorbus/rpc/control_link.h"

// Where daemon and agents of a user live, and what to say when they do not answer.
namespace tensorbus::rpc {

/// The user's runtime folder: $TENSORBUS_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tensorbus, else
/// /tmp/tensorbus-UID. Not created here.
std::string DefaultRuntimeDir();

/// "unix:" + the daemon's socket in the runtime folder.
std::string DefaultDaemonTarget();

/// The path of a "unix:PATH" target; "" for any other target.
std::string UnixPathOf(std::string_view target);

/// Whether `target` is "unix:PATH" with a path that fits into a socket address, or "HOST:PORT".
/// gRPC would take 99999 for port 34463.
///
/// Errors: kInvalidArgument.
Status CheckTarget(std::string_view target);

/// Makes `dir` with mode 0700 if it is missing (its parent must exist).
///
/// Errors: kPermissionDenied when it is not ours or others may write to it: whoever may swap the
/// sockets in it could answer in the daemon's name.
Status EnsurePrivateDir(const std::string& dir);

/// OK when somebody listens on the UNIX socket at `path`.
///
/// Errors: kUnavailable/kNotRunning, kPermissionDenied, kInvalidArgument for a path too long.
Status ProbeSocket(const std::string& path);

/// Why nothing answers at `target`, for people: no socket there, nobody listens, no permission, or
/// just silence (`otherwise`).
///
/// Always a failure: kUnavailable/kNotRunning or kPermissionDenied, with the remedy.
Status DiagnoseUnreachable(const std::string& target, const std::string& otherwise);

/// A shared token from its file: the text without white space around it.
///
/// Errors: kNotFound/kPermissionDenied from opening; kInvalidArgument when it has fewer than 16
/// bytes, control characters, or the file may be read by others.
Result<std::string> ReadTokenFile(const std::string& path);

/// A file of at most 1 MiB, as text: certificates and keys.
Result<std::string> ReadSmallFile(const std::string& path);

/// Whether two secrets are equal, in time that does not depend on where they differ.
bool EqualSecrets(std::string_view a, std::string_view b);

}  // namespace tensorbus::rpc
