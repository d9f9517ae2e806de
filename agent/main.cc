#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>
#include <sys/signalfd.h>
#include <thread>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "agent/agent.h"
#include "tensorbus/base/log.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/base/service_flags.h"
#include "tensorbus/rpc/address.h"
#include "tensorbus/rpc/convert.h"
#include "tensorbus/transport/shm_transport.h"
#include "tensorbus/transport/staging_budget.h"
#include "tensorbus/transport/tcp_transport.h"

// tensorbus-agent: the data-plane process of one host.
namespace tensorbus::agent {
namespace {

struct Flags {
  std::string daemon = rpc::DefaultDaemonTarget();
  std::string socket = DefaultSocketPath();
  std::string data_listen = "127.0.0.1:0";
  std::string data_advertise;
  std::string name;
  std::string host;
  std::uint64_t staging_mib = 256;
  double bucket_timeout_s = 20;
  std::uint32_t copy_threads = 0;
  std::string token_file;
  std::string tls_ca;
  std::string tls_cert;
  std::string tls_key;
  std::vector<uid_t> allow_uids;
  std::string metrics_listen;
  std::string log_level = "info";
};

/// The secret of data connections: known once a daemon has said it. Thread-safe.
class DataToken {
 public:
  std::string Get() const {
    MutexLock lock(mutex_);
    return token_;
  }
  void Set(std::string token) {
    MutexLock lock(mutex_);
    token_ = std::move(token);
  }

 private:
  mutable Mutex mutex_;
  std::string token_ TB_GUARDED_BY(mutex_);
};

std::string HostName() {
  std::array<char, 256> name = {};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

std::string CheckName(const std::string& text) {
  if (text.empty()) return "";  // as if not given
  return rpc::CheckName("the name", text).message();
}

/// Not by CLI11's Range, in which NaN is.
std::string CheckBucketTimeout(const std::string& text) {
  double value = 0;
  if (CLI::detail::lexical_cast(text, value) && value >= 0.1 && value <= 3600) return "";
  return fmt::format("'{}' is not a number of seconds from 0.1 to 3600", text);
}

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_option("--daemon", flags.daemon, "Where tensorbusd listens: unix:PATH or HOST:PORT")
      ->envname("TENSORBUS_DAEMON")
      ->check([](const std::string& target) { return rpc::CheckTarget(target).message(); }, "")
      ->capture_default_str();
  app.add_option("--socket", flags.socket, "UNIX socket for the workers of this host")
      ->envname("TENSORBUS_AGENT_SOCKET")
      ->capture_default_str();
  app.add_option("--data-listen", flags.data_listen,
                 "Numeric HOST:PORT for bytes to and from other agents; port 0: any; \"off\": none")
      ->envname("TENSORBUS_DATA_LISTEN")
      ->capture_default_str();
  app.add_option("--data-advertise", flags.data_advertise,
                 "Host that other agents should connect to, when --data-listen is a wildcard")
      ->envname("TENSORBUS_DATA_ADVERTISE");
  app.add_option("--name", flags.name, "Name of this agent on the bus (default: HOST/PID)")
      ->envname("TENSORBUS_AGENT_NAME")
      ->check(CheckName, "");
  app.add_option("--host", flags.host,
                 "Name of this host; agents that give the same are taken to be close")
      ->envname("TENSORBUS_HOST")
      ->check(CheckName, "");
  app.add_option("--staging-mib", flags.staging_mib, "Most memory for bytes on their way")
      ->envname("TENSORBUS_STAGING_MIB")
      ->check(CLI::Range(1U, 1U << 20))
      ->capture_default_str();
  app.add_option("--copy-threads", flags.copy_threads, "Threads that copy (0: one per core)")
      ->envname("TENSORBUS_COPY_THREADS")
      ->check(CLI::Range(0U, 1024U))
      ->capture_default_str();
  app.add_option("--token-file", flags.token_file, "Shared token for a daemon over TCP")
      ->envname("TENSORBUS_TOKEN_FILE");
  app.add_option("--tls-ca", flags.tls_ca, "mTLS: certificate authority (PEM)")
      ->envname("TENSORBUS_TLS_CA");
  app.add_option("--tls-cert", flags.tls_cert, "mTLS: our certificate (PEM)")
      ->envname("TENSORBUS_TLS_CERT");
  app.add_option("--tls-key", flags.tls_key, "mTLS: our key (PEM)")->envname("TENSORBUS_TLS_KEY");
  app.add_option("--allow-uid", flags.allow_uids,
                 "Further users whose workers may connect (besides ours and root)");
  app.add_option("--bucket-timeout-s", flags.bucket_timeout_s,
                 "How long a worker may take to pack or unpack private memory once")
      ->envname("TENSORBUS_AGENT_BUCKET_TIMEOUT_S")
      ->check(CheckBucketTimeout, "")
      ->capture_default_str();
  app.add_option("--metrics-listen", flags.metrics_listen, "HOST:PORT of the Prometheus page")
      ->envname("TENSORBUS_AGENT_METRICS_LISTEN");
  app.add_option("--log-level", flags.log_level, "debug, info, warn or error")
      ->envname("TENSORBUS_LOG_LEVEL")
      ->check([](const std::string& text) { return ParseLogLevel(text).status().message(); }, "")
      ->capture_default_str();
  AddConfigFlags(app);
}

/// SIGTERM and SIGINT as a descriptor, blocked everywhere else; before any thread starts. A
/// terminal that closes does not end an agent.
UniqueFd TakeSignals() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigaddset(&set, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGHUP, SIG_IGN);
  return UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC));
}

void AwaitSignal(const UniqueFd& signals) {
  signalfd_siginfo info = {};
  while (::read(signals.get(), &info, sizeof info) < 0 && errno == EINTR) {
  }
}

Status Serve(const Flags& flags, const UniqueFd& signals) {
  const std::uint32_t threads = flags.copy_threads != 0
                                    ? flags.copy_threads
                                    : std::max(1U, std::thread::hardware_concurrency());
  Metrics metrics;
  if (!flags.metrics_listen.empty()) {
    TB_ASSIGN_OR_RETURN(const int port, metrics.Listen(flags.metrics_listen));
    Log(LogLevel::kInfo, "metrics_listening", {{"port", port}});
  }
  const auto staging = transport::StagingBudget::Create(flags.staging_mib << 20);
  const auto local = transport::ShmTransport::Create({.threads = threads});
  DataToken data_token;
  std::unique_ptr<transport::TcpTransport> remote;
  if (flags.data_listen != "off") {
    transport::TcpOptions tcp;
    tcp.listen = flags.data_listen;
    tcp.advertise_host = flags.data_advertise;
    tcp.token_source = [&data_token] { return data_token.Get(); };
    tcp.io_threads = threads;
    tcp.staging = staging;
    TB_ASSIGN_OR_RETURN(remote, transport::TcpTransport::Create(std::move(tcp)));
  }

  AgentOptions options;
  options.host = flags.host.empty() ? HostName() : flags.host;
  options.name = flags.name.empty() ? fmt::format("{}/{}", options.host, ::getpid()) : flags.name;
  options.workers.socket_path = flags.socket;
  options.workers.allow_uids = flags.allow_uids;
  options.daemon_target = flags.daemon;
  options.staging_bytes = flags.staging_mib << 20;
  options.work_thread_count = threads;
  options.bucket_patience =
      std::chrono::milliseconds(static_cast<std::int64_t>(flags.bucket_timeout_s * 1000));
  const std::string runtime = rpc::DefaultRuntimeDir();
  if (const Status status = rpc::EnsurePrivateDir(runtime); status.ok()) {
    options.trace_folder = runtime + "/traces";
  } else {
    Log(LogLevel::kWarn, "traces_not_kept", {{"error", status}});
  }
  rpc::DaemonAddress address;
  address.target = flags.daemon;
  address.token_file = flags.token_file;
  address.ca_file = flags.tls_ca;
  address.cert_file = flags.tls_cert;
  address.key_file = flags.tls_key;
  // Bad ones end us here; the link reads it anew whenever it connects.
  if (!flags.token_file.empty()) TB_RETURN_IF_ERROR(rpc::ReadTokenFile(flags.token_file).status());
  AgentParts parts;
  parts.local = local.get();
  parts.remote = remote.get();
  parts.open_link = [address](Executor& executor, rpc::ControlLink::OnMessage on_message,
                              rpc::ControlLink::OnLost on_lost) {
    return rpc::OpenControlLink(address, executor, std::chrono::seconds(5), std::move(on_message),
                                std::move(on_lost));
  };
  parts.on_data_token = [&data_token](const std::string& token) { data_token.Set(token); };
  parts.staging = staging;
  parts.metrics = &metrics;
  TB_ASSIGN_OR_RETURN(const std::unique_ptr<Agent> agent,
                      Agent::Create(std::move(options), std::move(parts)));
  Log(LogLevel::kInfo, "agent_listening",
      {{"socket", agent->socket_path()},
       {"data", remote != nullptr ? remote->endpoint() : std::string("off")},
       {"daemon", flags.daemon}});
  AwaitSignal(signals);
  Log(LogLevel::kInfo, "agent_stopping");
  agent->Stop();
  return {};
}

int Main(int argc, char** argv) {
  const UniqueFd signals = TakeSignals();
  CLI::App app("Moves model weights between the workers of this host and other agents.",
               "tensorbus-agent");
  Flags flags;
  AddFlags(app, flags);
  if (const std::optional<int> end = ParseServiceFlags(app, argc, argv)) return *end;
  InitLog("agent", ParseLogLevel(flags.log_level).value());
  const Status served = Serve(flags, signals);
  if (served.ok()) return 0;
  fmt::print(stderr, "tensorbus-agent: {}\n", Printable(served.ToString()));
  return served.code() == Code::kInvalidArgument ? 2 : 1;
}

}  // namespace
}  // namespace tensorbus::agent

int main(int argc, char** argv) {
  return tensorbus::agent::Main(argc, argv);
}
