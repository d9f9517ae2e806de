#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agent/daemon_link.h"
#include "agent/session.h"
#include "agent/worker_desk.h"
#include "agent/worker_server.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/base/metrics.h"
#include "tensorbus/base/status.h"
#include "tensorbus/transport/staging_budget.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::agent {

struct AgentOptions {
  std::string name;  ///< unique on the bus: "host-a/4711"
  std::string host;  ///< agents of equal host share memory-speed links
  WorkerServer::Options workers;
  std::string daemon_target;  ///< for messages
  std::uint64_t staging_bytes = 256U << 20;
  std::uint32_t work_thread_count = 2;
  Nanos daemon_wait = std::chrono::seconds(10);
  Nanos register_wait = std::chrono::minutes(12);
  Nanos publish_wait = std::chrono::minutes(1);
  Nanos claim_wait = std::chrono::minutes(12);
  /// How long a worker may take to pack or unpack private memory once.
  Nanos bucket_patience = std::chrono::seconds(20);
  std::size_t trace_record_count = 4096;
  /// Where the traces of failed sessions go; made if missing, its parent exists. Empty: nowhere.
  std::string trace_folder;
  Nanos daemon_retry_min = std::chrono::milliseconds(100);
  Nanos daemon_retry_max = std::chrono::seconds(5);
};

/// The seams of an agent: what tests replace. All borrowed, all outlive the agent.
struct AgentParts {
  transport::Transport* local = nullptr;   ///< between ranks of this agent
  transport::Transport* remote = nullptr;  ///< to other agents; may be null
  LinkFactory open_link;
  /// The secret that agents show each other on data connections, whenever a daemon says it.
  std::function<void(const std::string&)> on_data_token;
  /// What bytes on their way are counted in, by this agent and its transports; null: one of its own
  /// of `staging_bytes`.
  std::shared_ptr<transport::StagingBudget> staging;
  Metrics* metrics = nullptr;  ///< may be null
};

/// The data-plane process beside the workers, without its main(): serves workers, takes part in
/// sessions, keeps the link to the daemon.
///
/// It never ends by itself: not because of a worker, not because of the daemon.
///
/// Threads: Create(), Stop() and the destructor from outside; everything else runs on its own
/// executor thread, copies on the work threads and in the transports.
class Agent {
 public:
  /// Listens for workers and starts to look for the daemon. Errors: as LocalListener::Create(),
  /// and of the folder for traces.
  static Result<std::unique_ptr<Agent>> Create(AgentOptions options, AgentParts parts);
  /// Stop()s.
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  const std::string& socket_path() const;

  /// Lets workers go, cancels sessions, waits for copies, joins. Idempotent. Ends the process when
  /// that does not end within half a minute (StopGuard).
  void Stop();

 private:
  class Core;
  Agent();

  std::unique_ptr<ThreadExecutor> executor_;
  std::unique_ptr<Core> core_;
};

}  // namespace tensorbus::agent
