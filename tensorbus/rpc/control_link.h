#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"

namespace tensorbus::rpc {

/// How to reach the daemon and prove who we are.
struct DaemonAddress {
  std::string target = {};      ///< "unix:/run/…/daemon.sock" or "host:port"
  std::string token_file = {};  ///< shared token for TCP without mTLS; "" for none
  std::string ca_file = {};     ///< mTLS: all three set, or none
  std::string cert_file = {};
  std::string key_file = {};
};

/// An agent's stream to the daemon. Tests put a fake in its place.
///
/// Threads: thread-safe. Callbacks run on the executor given at creation, never inside a call, and
/// never after the destructor returned.
class ControlLink {
 public:
  using OnMessage = std::function<void(const proto::DaemonMessage&)>;
  /// The stream ended; nothing more will arrive. Runs at most once.
  using OnLost = std::function<void(Status)>;
  using OnLayout = std::function<void(Result<std::vector<std::byte>>)>;

  virtual ~ControlLink() = default;

  /// Queues one message; the queue is bounded, overflow loses the link (kBusy).
  virtual void Send(proto::AgentMessage message) = 0;
  /// Fetches a layout by hash. Errors: kNotFound, kDeadlineExceeded, kUnavailable.
  virtual void GetLayout(const Hash128& hash, Nanos timeout, OnLayout done) = 0;
};

/// Opens the stream; the caller sends Hello and gets Welcome like any message. Returns at once: a
/// daemon that is not there shows as on_lost with kUnavailable/kNotRunning within
/// `connect_timeout`.
std::unique_ptr<ControlLink> OpenControlLink(const DaemonAddress& address, Executor& executor,
                                             Nanos connect_timeout,
                                             ControlLink::OnMessage on_message,
                                             ControlLink::OnLost on_lost);

}  // namespace tensorbus::rpc
