#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "proto/tensorbus.grpc.pb.h"
#include "tensorbus/base/executor.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/rpc/agent_port.h"

// The two gRPC services of ControlServer. Private to this folder.
namespace tensorbus::rpc {

/// Who may call. A UNIX socket's peers were checked when they connected, mTLS peers by their
/// certificate; everybody else shows the token. Immutable.
struct Gate {
  std::string token;
  bool tls = false;

  /// Errors: kUnauthenticated, saying what was missing.
  Status Check(const grpc::CallbackServerContext& context) const;
};

class ServerStream;

/// Attach and GetLayout. Thread-safe.
class ControlService final : public proto::Control::CallbackService {
 public:
  ControlService(Gate gate, Executor& executor, ControlHandler& handler)
      : gate_(std::move(gate)), executor_(executor), handler_(handler) {}

  grpc::ServerBidiReactor<proto::AgentMessage, proto::DaemonMessage>* Attach(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* GetLayout(grpc::CallbackServerContext* context,
                                      const proto::GetLayoutRequest* request,
                                      proto::GetLayoutReply* reply) override;

  /// Ends every stream.
  void CloseAll(const Status& why);

 private:
  friend class ServerStream;
  void Forget(PortId port);

  const Gate gate_;
  Executor& executor_;
  ControlHandler& handler_;
  std::atomic<std::uint64_t> next_port_{1};
  Mutex mutex_;
  std::map<PortId, std::weak_ptr<ServerStream>> streams_ TB_GUARDED_BY(mutex_);
};

/// Everything tensorbusctl asks. Thread-safe.
class AdminService final : public proto::Admin::CallbackService {
 public:
  AdminService(Gate gate, Executor& executor, AdminHandler& handler)
      : gate_(std::move(gate)), executor_(executor), handler_(handler) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext*, const proto::StatusRequest*,
                                      proto::StatusReply*) override;
  grpc::ServerUnaryReactor* GetVersions(grpc::CallbackServerContext*, const proto::VersionsRequest*,
                                        proto::VersionsReply*) override;
  grpc::ServerUnaryReactor* Rollback(grpc::CallbackServerContext*, const proto::RollbackRequest*,
                                     proto::RollbackReply*) override;
  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext*, const proto::ExplainRequest*,
                                    proto::ExplainReply*) override;
  grpc::ServerUnaryReactor* WhoIsMissing(grpc::CallbackServerContext*,
                                         const proto::WhoIsMissingRequest*,
                                         proto::WhoIsMissingReply*) override;
  grpc::ServerUnaryReactor* Verify(grpc::CallbackServerContext*, const proto::VerifyRequest*,
                                   proto::VerifyReply*) override;
  grpc::ServerUnaryReactor* Trace(grpc::CallbackServerContext*, const proto::TraceRequest*,
                                  proto::TraceReply*) override;

 private:
  template <typename Request, typename Reply>
  grpc::ServerUnaryReactor* Forward(
      grpc::CallbackServerContext* context, const Request* request, Reply* reply,
      void (AdminHandler::*method)(const Request&, std::function<void(Result<Reply>)>));

  const Gate gate_;
  Executor& executor_;
  AdminHandler& handler_;
};

}  // namespace tensorbus::rpc
