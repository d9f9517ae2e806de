#pragma once

#include "tensorbus/base/metrics.h"
#include "tensorbus/base/status.h"

namespace tensorbus::daemon {

/// The daemon's series; docs/metrics.md lists them. Thread-safe; borrows the registry.
class DaemonMetrics {
 public:
  explicit DaemonMetrics(Metrics& registry);

  Gauge& agents;
  Gauge& ranks;
  Gauge& channels;
  Gauge& sessions_running;
  Counter& sessions_done;
  Counter& sessions_failed;
  Counter& session_bytes;
  Histogram& session_seconds;
  Histogram& prepare_seconds;
  Histogram& move_seconds;
  Histogram& flip_seconds;
  Histogram& release_wait_seconds;
  Counter& publishes_accepted;
  Counter& publishes_refused;
  Counter& requests_failed;
  Counter& ranks_refused;
  Counter& agents_lost;
  Counter& messages;
};

}  // namespace tensorbus::daemon
