#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/control_server.h"

namespace tensorbus::daemon {

struct DaemonOptions {
  rpc::ServerOptions server = {};
  std::string metrics_listen = {};  ///< "host:port"; "" for none
  /// `data_token` and `first_session` are chosen by Start() unless set.
  CoreOptions core = {};
};

/// A whole daemon inside this process: the core on its executor, the listening side, the metrics.
///
/// Threads: one thread starts and stops it.
class Daemon {
 public:
  /// Errors: as ControlServer::Start() and Metrics::Listen().
  static Result<std::unique_ptr<Daemon>> Start(DaemonOptions options);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  /// Where it listens, as clients dial it.
  const std::vector<std::string>& addresses() const;
  int metrics_port() const;  ///< 0 for none

  /// Tells the agents, ends within a few seconds. Idempotent.
  void Stop();

 private:
  struct State;
  explicit Daemon(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tensorbus::daemon
