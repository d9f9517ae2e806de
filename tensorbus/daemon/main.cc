#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "tensorbus/base/environment.h"
#include "tensorbus/base/log.h"
#include "tensorbus/daemon/daemon.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/grpc_log.h"

namespace {

using tensorbus::Log;
using tensorbus::LogLevel;

/// Every option but those that say what to do has a variable: TENSORBUS_ and its name.
std::vector<tensorbus::EnvironmentFlag> EnvironmentFlags(const CLI::App& app) {
  std::vector<tensorbus::EnvironmentFlag> flags;
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_single_name();
    if (name == "help" || name == "print-config") continue;
    std::string variable = "TENSORBUS_";
    for (const char c : name) {
      variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    flags.push_back({.flag = "--" + name, .variable = variable});
  }
  return flags;
}

int Fail(const tensorbus::Status& status) {
  fmt::print(stderr, "tensorbusd: {}\n", status.message());
  return status.code() == tensorbus::Code::kInvalidArgument ? 2 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  tensorbus::daemon::DaemonOptions options;
  std::string log_level = "info";
  bool print_config = false;
  CLI::App app{
      "tensorbusd: the control plane of Tensorbus. Knows who is there, which versions exist and "
      "which "
      "sessions run; never touches tensor bytes."};
  app.add_option("--listen", options.server.listen,
                 "Address to listen on, repeatable: unix:PATH or host:port (default: the socket in "
                 "the user's runtime folder)");
  app.add_option("--token-file", options.server.token_file,
                 "Shared token that callers over TCP must show (mode 0600)");
  app.add_option("--tls-ca", options.server.ca_file, "mTLS: certificate of the CA of our callers");
  app.add_option("--tls-cert", options.server.cert_file, "mTLS: our certificate");
  app.add_option("--tls-key", options.server.key_file, "mTLS: our key");
  app.add_option("--allow-uid", options.server.allow_uids,
                 "User that may connect to the UNIX socket besides root and ourselves, repeatable");
  app.add_option("--metrics-listen", options.metrics_listen,
                 "Serve Prometheus metrics at http://ADDRESS/metrics");
  app.add_option("--log-level", log_level, "debug, info, warn or error")->capture_default_str();
  app.add_flag("--print-config", print_config, "Show what flags, environment and --config come to");
  app.set_config("--config", "", "Options from a TOML or INI file");
  try {
    std::vector<std::string> arguments =
        tensorbus::WithEnvironment(argc, argv, EnvironmentFlags(app));
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (print_config) {
    fmt::print("{}", app.config_to_str(true));
    return 0;
  }
  const tensorbus::Result<LogLevel> level = tensorbus::ParseLogLevel(log_level);
  if (!level.ok()) return Fail(level.status());
  tensorbus::InitLog("daemon", *level);
  tensorbus::rpc::RouteGrpcLog();

  // Signals are waited for below; threads started from here on inherit the mask.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

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
