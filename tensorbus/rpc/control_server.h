#pragma once

#include <memory>
#include <string>
#include <sys/types.h>
#include <vector>

#include "tensorbus/base/executor.h"
#include "tensorbus/base/status.h"
#include "tensorbus/rpc/agent_port.h"

namespace tensorbus::rpc {

/// Where and for whom the daemon listens.
struct ServerOptions {
  /// "unix:PATH" (peer credentials are checked) or "host:port" (needs a token or mTLS; port 0:
  /// chosen by the system).
  std::vector<std::string> listen = {};
  std::string token_file = {};  ///< shared token for TCP
  std::string ca_file = {};     ///< mTLS: all three set, or none
  std::string cert_file = {};
  std::string key_file = {};
  /// Users that may connect to UNIX sockets besides root and ourselves.
  std::vector<uid_t> allow_uids = {};
};

/// The daemon's listening side: agents' streams and tensorbusctl's calls.
///
/// Handlers run on the executor; gRPC's threads only convert and post. One message of a stream is
/// on its way at a time, so a fast agent is slowed down, not queued.
///
/// Threads: Start() and Stop() on one thread that is not the executor's. The handlers and the
/// executor outlive the server.
class ControlServer {
 public:
  /// Opens all addresses, or none.
  ///
  /// Errors: kInvalidArgument for options that do not fit together (TCP without any proof);
  /// kAlreadyExists when another daemon listens there; kPermissionDenied for a folder others can
  /// write to; from reading the files.
  static Result<std::unique_ptr<ControlServer>> Start(const ServerOptions& options,
                                                      Executor& executor, ControlHandler& control,
                                                      AdminHandler& admin);
  ~ControlServer();
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;

  /// The addresses as clients dial them, with the ports that were chosen.
  const std::vector<std::string>& addresses() const;

  /// Ends all streams and calls within `grace`, and removes the sockets. Idempotent.
  void Stop(Nanos grace);

 private:
  struct State;
  explicit ControlServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tensorbus::rpc
