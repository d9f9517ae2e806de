#include "tensorbus/rpc/control_server.h"

#include <algorithm>
#include <chrono>
#include <fmt/format.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>

#include "tensorbus/base/log.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/channel.h"
#include "tensorbus/rpc/server_services.h"
#include "tensorbus/rpc/unix_listener.h"

namespace tensorbus::rpc {

namespace {

constexpr int kMinPingIntervalMs = 1000;
constexpr int kServerKeepaliveMs = 10000;
/// How often certificates are looked at, so that they can be replaced without a restart.
constexpr unsigned kCertificateRefreshSeconds = 1;

Result<std::shared_ptr<grpc::ServerCredentials>> TcpCredentials(const ServerOptions& options) {
  const int files = static_cast<int>(!options.ca_file.empty()) +
                    static_cast<int>(!options.cert_file.empty()) +
                    static_cast<int>(!options.key_file.empty());
  if (files == 0) {
    if (options.token_file.empty()) {
      return Status(Code::kInvalidArgument,
                    "listening on TCP needs --token-file, or --tls-ca, --tls-cert and --tls-key");
    }
    return grpc::InsecureServerCredentials();
  }
  if (files != 3) {
    return Status(Code::kInvalidArgument,
                  "mTLS takes three files: --tls-ca, --tls-cert and --tls-key");
  }
  // The watcher reports a file that it cannot read by refusing every caller; say it here instead.
  for (const std::string& file : {options.ca_file, options.cert_file, options.key_file}) {
    TB_RETURN_IF_ERROR(ReadSmallFile(file).status());
  }
  grpc::experimental::TlsServerCredentialsOptions tls(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          options.key_file, options.cert_file, options.ca_file, kCertificateRefreshSeconds));
  tls.watch_root_certs();
  tls.watch_identity_key_cert_pairs();
  tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(tls);
}

}  // namespace

struct ControlServer::State {
  std::unique_ptr<ControlService> control;
  std::unique_ptr<AdminService> admin;
  std::unique_ptr<grpc::Server> server;
  std::vector<std::unique_ptr<UnixListener>> unix_listeners;  // die before the server
  std::vector<std::string> addresses;
  bool stopped = false;

  Status Build(const ServerOptions& options);
  Status ListenUnix(const std::string& path, const ServerOptions& options);
};

Status ControlServer::State::Build(const ServerOptions& options) {
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kServerKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kServerKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  std::vector<std::pair<std::string, std::unique_ptr<int>>> ports;
  for (const std::string& address : options.listen) {
    TB_RETURN_IF_ERROR(CheckTarget(address));
    if (!UnixPathOf(address).empty()) continue;
    TB_ASSIGN_OR_RETURN(const auto credentials, TcpCredentials(options));
    auto port = std::make_unique<int>(0);
    builder.AddListeningPort(address, credentials, port.get());
    ports.emplace_back(address, std::move(port));
  }
  builder.RegisterService(control.get());
  builder.RegisterService(admin.get());
  server = builder.BuildAndStart();
  if (server == nullptr) {
    std::string all;
    for (const auto& entry : ports) all += (all.empty() ? "" : ", ") + entry.first;
    return {Code::kUnavailable,
            fmt::format("cannot listen on {}; is the port taken or the host not ours?", all)};
  }
  for (const auto& [address, port] : ports) {
    addresses.push_back(fmt::format("{}:{}", address.substr(0, address.rfind(':')), *port));
  }
  return {};
}

Status ControlServer::State::ListenUnix(const std::string& path, const ServerOptions& options) {
  TB_ASSIGN_OR_RETURN(auto listener,
                      UnixListener::Start(path, options.allow_uids, [this](UniqueFd fd) {
                        grpc::AddInsecureChannelFromFd(server.get(), fd.release());
                      }));
  unix_listeners.push_back(std::move(listener));
  addresses.push_back("unix:" + path);
  return {};
}

Result<std::unique_ptr<ControlServer>> ControlServer::Start(const ServerOptions& options,
                                                            Executor& executor,
                                                            ControlHandler& control,
                                                            AdminHandler& admin) {
  if (options.listen.empty()) {
    return Status(Code::kInvalidArgument, "no address to listen on");
  }
  Gate gate;
  gate.tls = !options.ca_file.empty();
  if (!options.token_file.empty()) {
    TB_ASSIGN_OR_RETURN(gate.token, ReadTokenFile(options.token_file));
  }
  auto state = std::make_unique<State>();
  state->control = std::make_unique<ControlService>(gate, executor, control);
  state->admin = std::make_unique<AdminService>(gate, executor, admin);
  TB_RETURN_IF_ERROR(state->Build(options));
  auto server = std::unique_ptr<ControlServer>(new ControlServer(std::move(state)));
  for (const std::string& address : options.listen) {
    const std::string path = UnixPathOf(address);
    if (path.empty()) continue;
    TB_RETURN_IF_ERROR(server->state_->ListenUnix(path, options));
  }
  return server;
}

ControlServer::ControlServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

ControlServer::~ControlServer() {
  Stop(Nanos::zero());
}

const std::vector<std::string>& ControlServer::addresses() const {
  return state_->addresses;
}

void ControlServer::Stop(Nanos grace) {
  if (std::exchange(state_->stopped, true)) return;
  for (const auto& listener : state_->unix_listeners) listener->Stop();
  state_->control->CloseAll(Status(Code::kUnavailable, "the daemon stops", Reason::kPeerLost));
  state_->server->Shutdown(std::chrono::system_clock::now() + grace);
  state_->server->Wait();
}

}  // namespace tensorbus::rpc
