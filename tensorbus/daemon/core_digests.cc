#include "tensorbus/daemon/core.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::daemon {

void Core::AddRoutes(const Channel&, const Replica&, const TensorSpec&,
                     proto::ExplainReply&) const {}

void Core::Verify(const proto::VerifyRequest&, Done<proto::VerifyReply> done) {
  done(Status(Code::kUnimplemented, "verify is not there yet", Reason::kUnsupported));
}

void Core::OnClaim(Agent& agent, const proto::ClaimVersion& message) {
  proto::ClaimAnswered reply;
  reply.set_request(message.request());
  *reply.mutable_error() =
      rpc::ToProto(Status(Code::kNotFound, "no kept version equals what the rank holds"));
  SendTo(agent.name, Wrap(&proto::DaemonMessage::mutable_claim_answered, std::move(reply)));
}

}  // namespace tensorbus::daemon
