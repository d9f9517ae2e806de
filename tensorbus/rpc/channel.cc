#include "tensorbus/rpc/channel.h"

#include <chrono>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "tensorbus/rpc/address.h"

namespace tensorbus::rpc {

namespace {

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
