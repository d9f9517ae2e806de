#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "tensorbus/base/log.h"
#include "tensorbus/daemon/daemon.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/grpc_log.h"

namespace {

using tensorbus::Log;
using tensorbus::LogLevel;

/// The command line, with what the environment says put in for options it does not name: flags beat
/// the environment, which beats --config, which beats the default.
std::vector<std::string> WithEnvironment(const CLI::App& app, int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_single_name();
    std::string variable = "TENSORBUS_";
    for (const char c : name) {
      variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    const char* value = std::getenv(variable.c_str());  // NOLINT(concurrency-mt-unsafe)
    if (value == nullptr || *value == 0 || name == "help" || name == "print-config") continue;
    const std::string flag = "--" + name;
    bool given = false;
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      given = given || argument == flag || argument.starts_with(flag + "=");
    }
    if (!given) arguments.push_back(flag + "=" + value);
  }
  return {arguments.rbegin(), arguments.rend()};
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
    app.parse(WithEnvironment(app, argc, argv));
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
