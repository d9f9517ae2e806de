#include <cctype>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "tensorbus/base/log.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/base/service_flags.h"
#include "tensorbus/daemon/daemon.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/grpc_log.h"

namespace {

using tensorbus::Log;
using tensorbus::LogLevel;

/// TENSORBUS_ and the flag's name.
void NameVariables(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string name = option->get_single_name();
    if (name == "help" || name == "print-config") continue;
    std::string variable = "TENSORBUS_";
    for (const char c : name) {
      variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    option->envname(variable);
  }
}

/// "" is what --print-config shows for none.
std::string CheckListen(const std::string& target) {
  return target.empty() ? "" : tensorbus::rpc::CheckTarget(target).message();
}

int Fail(const tensorbus::Status& status) {
  fmt::print(stderr, "tensorbusd: {}\n", tensorbus::Printable(status.message()));
  return status.code() == tensorbus::Code::kInvalidArgument ? 2 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  tensorbus::daemon::DaemonOptions options;
  std::string log_level = "info";
  CLI::App app{
      "The control plane of Tensorbus. Knows who is there, which versions exist and which sessions "
      "run; never touches tensor bytes.",
      "tensorbusd"};
  app.add_option("--listen", options.server.listen,
                 "Address to listen on, repeatable: unix:PATH or host:port (default: the socket in "
                 "the user's runtime folder)")
      ->check(CheckListen, "");
  app.add_option("--token-file", options.server.token_file,
                 "Shared token that callers over TCP must show (mode 0600)");
  app.add_option("--tls-ca", options.server.ca_file, "mTLS: certificate of the CA of our callers");
  app.add_option("--tls-cert", options.server.cert_file, "mTLS: our certificate");
  app.add_option("--tls-key", options.server.key_file, "mTLS: our key");
  app.add_option("--allow-uid", options.server.allow_uids,
                 "User that may connect to the UNIX socket besides root and ourselves, repeatable");
  app.add_option("--metrics-listen", options.metrics_listen,
                 "Serve Prometheus metrics at http://ADDRESS/metrics");
  app.add_option("--log-level", log_level, "debug, info, warn or error")
      ->check([](const std::string& t) { return tensorbus::ParseLogLevel(t).status().message(); },
              "")
      ->capture_default_str();
  tensorbus::AddConfigFlags(app);
  NameVariables(app);
  if (const std::optional<int> end = tensorbus::ParseServiceFlags(app, argc, argv)) return *end;

  // Signals are waited for below; threads started from here on inherit the mask. gRPC starts its
  // first ones already when it is told where to log: one without the mask would be given a signal
  // while this thread does not wait for it, and end the process.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  tensorbus::InitLog("daemon", tensorbus::ParseLogLevel(log_level).value());
  tensorbus::rpc::RouteGrpcLog();

  std::erase(options.server.listen, "");
  if (options.server.listen.empty()) {
    const std::string dir = tensorbus::rpc::DefaultRuntimeDir();
    if (const auto status = tensorbus::rpc::EnsurePrivateDir(dir); !status.ok()) {
      return Fail(status);
    }
    options.server.listen.push_back(tensorbus::rpc::DefaultDaemonTarget());
  }
  auto daemon = tensorbus::daemon::Daemon::Start(std::move(options));
  if (!daemon.ok()) return Fail(daemon.status());
  for (const std::string& address : (*daemon)->addresses()) {
    Log(LogLevel::kInfo, "listening", {{"address", address}});
  }
  if ((*daemon)->metrics_port() != 0) {
    Log(LogLevel::kInfo, "metrics", {{"port", (*daemon)->metrics_port()}});
  }
  int signal = 0;
  while (sigwait(&signals, &signal) != 0 || signal == SIGHUP) {
  }
  Log(LogLevel::kInfo, "stopping", {{"signal", signal}});
  (*daemon)->Stop();
  return 0;
}
