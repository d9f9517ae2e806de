#pragma once

#include <memory>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/rpc/control_link.h"

namespace tensorbus::rpc {

/// tensorbusctl's calls to the daemon. Each blocks for at most the timeout given at creation and
/// fails with kUnavailable/kNotRunning, kPermissionDenied, kUnauthenticated, or kDeadlineExceeded
/// naming the daemon.
///
/// Threads: thread-safe.
class AdminClient {
 public:
  /// Errors: from reading the address's files; kInvalidArgument for half an mTLS set.
  static Result<std::unique_ptr<AdminClient>> Create(const DaemonAddress& address, Nanos timeout);
  ~AdminClient();
  AdminClient(const AdminClient&) = delete;
  AdminClient& operator=(const AdminClient&) = delete;

  Result<proto::StatusReply> GetStatus(const proto::StatusRequest& request);
  Result<proto::VersionsReply> GetVersions(const proto::VersionsRequest& request);
  Result<proto::RollbackReply> Rollback(const proto::RollbackRequest& request);
  Result<proto::ExplainReply> Explain(const proto::ExplainRequest& request);
  Result<proto::WhoIsMissingReply> WhoIsMissing(const proto::WhoIsMissingRequest& request);
  Result<proto::VerifyReply> Verify(const proto::VerifyRequest& request);
  Result<proto::TraceReply> Trace(const proto::TraceRequest& request);

 private:
  struct State;
  explicit AdminClient(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tensorbus::rpc
