#include "tensorbus/daemon/daemon_metrics.h"

#include <vector>

namespace tensorbus::daemon {

namespace {

const std::vector<double> kSecondsBounds = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2,
                                            0.5,    1,     2,     5,     10,   20,   50,   100};

Histogram& Phase(Metrics& registry, const char* phase) {
  return registry.AddHistogram("tensorbus_daemon_session_phase_seconds",
                               "Time sessions spent in one phase", kSecondsBounds,
                               {{"phase", phase}});
}

}  // namespace

DaemonMetrics::DaemonMetrics(Metrics& registry)
    : agents(registry.AddGauge("tensorbus_daemon_agents_count", "Agents that are attached")),
      ranks(registry.AddGauge("tensorbus_daemon_ranks_count", "Ranks that are registered")),
      channels(registry.AddGauge("tensorbus_daemon_channels_count", "Channels that are known")),
      sessions_running(
          registry.AddGauge("tensorbus_daemon_sessions_running_count", "Sessions that run now")),
      sessions_done(registry.AddCounter("tensorbus_daemon_sessions_total",
                                        "Sessions that ended, by outcome", {{"outcome", "done"}})),
      sessions_failed(registry.AddCounter("tensorbus_daemon_sessions_total",
                                          "Sessions that ended, by outcome",
                                          {{"outcome", "failed"}})),
      session_bytes(registry.AddCounter("tensorbus_daemon_session_bytes_total",
                                        "Bytes that arrived at targets of finished sessions")),
      session_seconds(registry.AddHistogram("tensorbus_daemon_session_seconds",
                                            "Time from opening a session to its end",
                                            kSecondsBounds)),
      prepare_seconds(Phase(registry, "prepare")),
      move_seconds(Phase(registry, "move")),
      flip_seconds(Phase(registry, "flip")),
      release_wait_seconds(registry.AddHistogram(
          "tensorbus_daemon_release_wait_seconds",
          "Time producer ranks waited until they might write published memory", kSecondsBounds)),
      publishes_accepted(registry.AddCounter("tensorbus_daemon_publishes_total",
                                             "Publishes of ranks, by outcome",
                                             {{"outcome", "accepted"}})),
      publishes_refused(registry.AddCounter("tensorbus_daemon_publishes_total",
                                            "Publishes of ranks, by outcome",
                                            {{"outcome", "refused"}})),
      requests_failed(registry.AddCounter("tensorbus_daemon_requests_failed_total",
                                          "Version requests of ranks that failed")),
      ranks_refused(registry.AddCounter("tensorbus_daemon_ranks_refused_total",
                                        "Registrations that were refused")),
      agents_lost(registry.AddCounter("tensorbus_daemon_agents_lost_total",
                                      "Agents whose stream ended or fell silent")),
      messages(registry.AddCounter("tensorbus_daemon_messages_total",
                                   "Messages that came from agents")) {}

}  // namespace tensorbus::daemon
