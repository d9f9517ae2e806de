#include "tensorbus/rpc/admin_client.h"

#include <fmt/format.h>

#include "proto/tensorbus.grpc.pb.h"
#include "tensorbus/rpc/channel.h"

namespace tensorbus::rpc {

struct AdminClient::State {
  DaemonChannel channel;
  Nanos timeout{};
  std::unique_ptr<proto::Admin::Stub> stub;

  template <typename Request, typename Reply>
  Result<Reply> Call(grpc::Status (proto::Admin::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Reply*),
                     const Request& request) {
    grpc::ClientContext context;
    channel.Equip(context, timeout);
    Reply reply;
    const grpc::Status outcome = ((*stub).*method)(&context, request, &reply);
    if (outcome.ok()) return reply;
    const Status status = channel.FailureOf(outcome);
    const bool silent = outcome.error_details().empty();
    if (silent && status.code() == Code::kDeadlineExceeded) {
      return Status(status.code(),
                    fmt::format("{} ({:.1f} s); look at its log, or give more time with --timeout",
                                status.message(), Seconds(timeout)),
                    status.reason());
    }
    return status;
  }
};

Result<std::unique_ptr<AdminClient>> AdminClient::Create(const DaemonAddress& address,
                                                         Nanos timeout) {
  auto state = std::make_unique<State>();
  TB_ASSIGN_OR_RETURN(state->channel, OpenChannel(address));
  state->timeout = timeout;
  state->stub = proto::Admin::NewStub(state->channel.channel);
  return std::unique_ptr<AdminClient>(new AdminClient(std::move(state)));
}

AdminClient::AdminClient(std::unique_ptr<State> state) : state_(std::move(state)) {}
AdminClient::~AdminClient() = default;

Result<proto::StatusReply> AdminClient::GetStatus(const proto::StatusRequest& request) {
  return state_->Call(&proto::Admin::Stub::GetStatus, request);
}
Result<proto::VersionsReply> AdminClient::GetVersions(const proto::VersionsRequest& request) {
  return state_->Call(&proto::Admin::Stub::GetVersions, request);
}
Result<proto::RollbackReply> AdminClient::Rollback(const proto::RollbackRequest& request) {
  return state_->Call(&proto::Admin::Stub::Rollback, request);
}
Result<proto::ExplainReply> AdminClient::Explain(const proto::ExplainRequest& request) {
  return state_->Call(&proto::Admin::Stub::Explain, request);
}
Result<proto::WhoIsMissingReply> AdminClient::WhoIsMissing(
    const proto::WhoIsMissingRequest& request) {
  return state_->Call(&proto::Admin::Stub::WhoIsMissing, request);
}
Result<proto::VerifyReply> AdminClient::Verify(const proto::VerifyRequest& request) {
  return state_->Call(&proto::Admin::Stub::Verify, request);
}
Result<proto::TraceReply> AdminClient::Trace(const proto::TraceRequest& request) {
  return state_->Call(&proto::Admin::Stub::Trace, request);
}

}  // namespace tensorbus::rpc
