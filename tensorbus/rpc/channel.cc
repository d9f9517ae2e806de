#include "tensorbus/rpc/channel.h"

#include <chrono>
#include <fmt/format.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/status_map.h"

namespace tensorbus::rpc {

namespace {

/// gRPC's words for why it has no connection, in ours: they name its parts, not the remedy.
std::string PlainReason(const std::string& text) {
  const auto says = [&text](std::string_view part) { return text.find(part) != std::string::npos; };
  if (says("Connection refused")) return "nobody listens there";
  if (says("DNS resolution failed")) return "the name of that host is not known";
  if (says("unreachable") || says("No route")) return "there is no way to that host";
  if (says("imed out") || says("Timeout")) return "it does not answer";
  if (says("HTTP/2") || says("http1.x") || says("SETTINGS") || says("andshake") || says("SSL")) {
    return "what listens there does not speak the daemon's protocol (an agent's socket? plain text "
           "in place of TLS?)";
  }
  if (says("closed") || says("reset") || says("Broken pipe")) {
    return "what listens there closed the connection";
  }
  return fmt::format("no connection (gRPC: {})", text);
}

/// A peer that answers no ping for this long is gone, even when TCP does not notice.
constexpr int kKeepaliveMs = 5000;

Result<std::shared_ptr<grpc::ChannelCredentials>> Credentials(const DaemonAddress& address) {
  const int files = static_cast<int>(!address.ca_file.empty()) +
                    static_cast<int>(!address.cert_file.empty()) +
                    static_cast<int>(!address.key_file.empty());
  if (files == 0) return grpc::InsecureChannelCredentials();
  if (files != 3) {
    return Status(Code::kInvalidArgument,
                  "mTLS takes three files: the CA's certificate, our certificate and our key");
  }
  grpc::SslCredentialsOptions options;
  TB_ASSIGN_OR_RETURN(options.pem_root_certs, ReadSmallFile(address.ca_file));
  TB_ASSIGN_OR_RETURN(options.pem_cert_chain, ReadSmallFile(address.cert_file));
  TB_ASSIGN_OR_RETURN(options.pem_private_key, ReadSmallFile(address.key_file));
  return grpc::SslCredentials(options);
}

}  // namespace

void DaemonChannel::Equip(grpc::ClientContext& context, Nanos timeout) const {
  if (!token.empty()) context.AddMetadata(kTokenKey, token);
  if (timeout > Nanos::zero()) context.set_deadline(std::chrono::system_clock::now() + timeout);
}

Status DaemonChannel::FailureOf(const grpc::Status& outcome) const {
  // Whatever our own servers fail with has details (ToGrpc()).
  if (outcome.ok() || !outcome.error_details().empty()) return FromGrpc(outcome);
  switch (outcome.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
      return DiagnoseUnreachable(target, PlainReason(outcome.error_message()));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return {Code::kDeadlineExceeded,
              fmt::format("the daemon at {} has not answered in time", target), Reason::kPeerLost};
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return {
          Code::kFailedPrecondition,
          fmt::format("what listens at {} is no tensorbusd, or one of another version (gRPC: {}); "
                      "say with --daemon where the daemon is",
                      target, outcome.error_message()),
          Reason::kProtocolVersion};
    default:
      return FromGrpc(outcome).Annotate("call to the daemon at " + target);
  }
}

Result<DaemonChannel> OpenChannel(const DaemonAddress& address) {
  TB_RETURN_IF_ERROR(CheckTarget(address.target));
  DaemonChannel out;
  out.target = address.target;
  if (!address.token_file.empty()) {
    TB_ASSIGN_OR_RETURN(out.token, ReadTokenFile(address.token_file));
  }
  TB_ASSIGN_OR_RETURN(const auto credentials, Credentials(address));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A proxy from the environment is never meant for us.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  std::string target = address.target;
  if (!UnixPathOf(target).empty()) target = "unix:" + UnixPathOf(target);
  out.channel = grpc::CreateCustomChannel(target, credentials, arguments);
  return out;
}

}  // namespace tensorbus::rpc
