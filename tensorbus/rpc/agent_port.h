#pragma once

#include <functional>
#include <memory>
#include <string>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/ids.h"

namespace tensorbus::rpc {

/// One agent's stream, as the daemon sees it. Tests put a fake in its place. Thread-safe.
class AgentPort {
 public:
  virtual ~AgentPort() = default;

  /// Queues one message. The queue is bounded: an agent that does not read any more is closed with
  /// kResourceExhausted/kBusy.
  virtual void Send(proto::DaemonMessage message) = 0;
  /// Ends the stream after what is queued; the agent sees `status`. Idempotent.
  virtual void Close(Status status) = 0;
};

/// Numbers the streams of one daemon's life; never used twice.
using PortId = Id<struct PortTag>;

/// What the daemon does with what agents say. Every call comes on the executor given to the server.
class ControlHandler {
 public:
  using OnLayout = std::function<void(Result<std::string>)>;

  virtual ~ControlHandler() = default;

  /// A stream opened. `peer` is for messages: "fd:12", "ipv4:10.0.0.1:555".
  virtual void OnAttach(PortId port, std::shared_ptr<AgentPort> agent, const std::string& peer) = 0;
  virtual void OnMessage(PortId port, const proto::AgentMessage& message) = 0;
  /// The stream is gone; nothing more comes from it.
  virtual void OnDetach(PortId port, const Status& why) = 0;
  /// Answers a layout as it was serialized, now or later; exactly once.
  virtual void OnGetLayout(const Hash128& hash, OnLayout done) = 0;
};

/// What the daemon answers to tensorbusctl. Every call comes on the executor given to the server;
/// `done` is called exactly once, now or later, from any thread.
class AdminHandler {
 public:
  template <typename Reply>
  using Done = std::function<void(Result<Reply>)>;

  virtual ~AdminHandler() = default;

  virtual void GetStatus(const proto::StatusRequest&, Done<proto::StatusReply>) = 0;
  virtual void GetVersions(const proto::VersionsRequest&, Done<proto::VersionsReply>) = 0;
  virtual void Rollback(const proto::RollbackRequest&, Done<proto::RollbackReply>) = 0;
  virtual void Explain(const proto::ExplainRequest&, Done<proto::ExplainReply>) = 0;
  virtual void WhoIsMissing(const proto::WhoIsMissingRequest&, Done<proto::WhoIsMissingReply>) = 0;
  virtual void Verify(const proto::VerifyRequest&, Done<proto::VerifyReply>) = 0;
  virtual void Trace(const proto::TraceRequest&, Done<proto::TraceReply>) = 0;
};

}  // namespace tensorbus::rpc
