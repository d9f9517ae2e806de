#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/base/status.h"
#include "tensorbus/rpc/control_link.h"
#include "tensorbus/rpc/protocol.h"

namespace tensorbus::agent {

/// Opens one stream to the daemon; tests give a fake one.
using LinkFactory = std::function<std::unique_ptr<rpc::ControlLink>(
    Executor& executor, rpc::ControlLink::OnMessage on_message, rpc::ControlLink::OnLost on_lost)>;

/// Keeps one stream to the daemon up: says hello, sends heartbeats, and opens the next one when it
/// is lost, after a pause that grows with every failure and is the longest when the daemon refuses.
///
/// Threads: confined to the executor.
class DaemonLink {
 public:
  struct Options {
    proto::Hello hello;
    Nanos welcome_timeout = rpc::kWelcomeTimeout;
    Nanos retry_min = std::chrono::milliseconds(100);
    Nanos retry_max = std::chrono::seconds(5);
  };
  struct Handler {
    std::function<void(const proto::Welcome&)> on_ready;
    /// Anything but Welcome.
    std::function<void(const proto::DaemonMessage&)> on_message;
    /// Only after on_ready.
    std::function<void(const Status&)> on_lost;
  };

  DaemonLink(Options options, Executor& executor, LinkFactory factory, Handler handler);
  ~DaemonLink();
  DaemonLink(const DaemonLink&) = delete;
  DaemonLink& operator=(const DaemonLink&) = delete;

  /// Opens the first stream.
  void Start();
  bool ready() const { return ready_; }
  /// Why the daemon did not want us, until one does; OK when none has refused.
  const Status& refused() const { return refused_; }
  /// Dropped while the link is not ready: whoever sends says everything again on_ready.
  void Send(proto::AgentMessage message);
  /// Fails with kUnavailable while the link is not ready.
  void GetLayout(const Hash128& hash, Nanos timeout, rpc::ControlLink::OnLayout done);

 private:
  void Open();
  void OnMessage(const proto::DaemonMessage& message);
  void OnWelcome(const proto::Welcome& welcome);
  void Lost(const Status& why);
  void Beat(std::uint64_t stream, Nanos interval);
  std::function<void()> IfAlive(std::function<void()> task);

  const Options options_;
  Executor& executor_;
  const LinkFactory factory_;
  const Handler handler_;
  std::unique_ptr<rpc::ControlLink> link_;
  std::uint64_t stream_ = 0;  ///< counts streams: what belongs to an older one is ignored
  bool ready_ = false;
  bool told_ = false;  ///< this outage is in the log already
  Status refused_;     ///< why the daemon does not want us, as it is in the log
  Nanos pause_;
  std::shared_ptr<bool> alive_;
};

}  // namespace tensorbus::agent
