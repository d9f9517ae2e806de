#include "tensorbus/daemon/daemon.h"

#include <chrono>
#include <fmt/format.h>

#include "tensorbus/base/metrics.h"
#include "tensorbus/daemon/secret.h"
#include "tensorbus/daemon/side_work.h"

namespace tensorbus::daemon {

namespace {

using namespace std::chrono_literals;

constexpr Nanos kStopGrace = 2s;
/// Sessions of one second of one life; a life that begins a second later counts from above them.
constexpr std::uint64_t kSessionsPerSecond = 1000;
constexpr std::uint64_t kSessionEpochSeconds = 1767225600;  // 2026-01-01

Result<std::string> RandomToken() {
  TB_ASSIGN_OR_RETURN(const std::string secret, RandomSecret());
  std::string token;
  for (const char byte : secret) token += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return token;
}

std::uint64_t FirstSession() {
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  const auto seconds = static_cast<std::uint64_t>(now < 0 ? 0 : now);
  return seconds > kSessionEpochSeconds ? (seconds - kSessionEpochSeconds) * kSessionsPerSecond : 1;
}

}  // namespace

struct Daemon::State {
  Metrics registry;
  DaemonMetrics metrics{registry};
  int metrics_port = 0;
  ThreadExecutor executor{"tb-daemon"};
  ThreadSideWork side_work{executor};
  std::unique_ptr<Core> core;
  std::unique_ptr<rpc::ControlServer> server;
};

Result<std::unique_ptr<Daemon>> Daemon::Start(DaemonOptions options) {
  auto state = std::make_unique<State>();
  if (options.core.data_token.empty()) {
    TB_ASSIGN_OR_RETURN(options.core.data_token, RandomToken());
  }
  if (options.core.first_session <= 1) options.core.first_session = FirstSession();
  if (!options.metrics_listen.empty()) {
    TB_ASSIGN_OR_RETURN(state->metrics_port, state->registry.Listen(options.metrics_listen));
  }
  state->core = std::make_unique<Core>(std::move(options.core), state->executor, state->side_work,
                                       state->metrics);
  auto server =
      rpc::ControlServer::Start(options.server, state->executor, *state->core, *state->core);
  if (!server.ok()) {
    state->side_work.Stop();
    state->executor.Stop();
    return server.status();
  }
  state->server = std::move(server).value();
  return std::unique_ptr<Daemon>(new Daemon(std::move(state)));
}

Daemon::Daemon(std::unique_ptr<State> state) : state_(std::move(state)) {}

Daemon::~Daemon() {
  Stop();
}

const std::vector<std::string>& Daemon::addresses() const {
  return state_->server->addresses();
}

int Daemon::metrics_port() const {
  return state_->metrics_port;
}

void Daemon::Stop() {
  // The executor runs until the server is down: open calls are answered by the core. What waits for
  // side work is answered now, so that the server need not wait for that.
  state_->executor.Post([state = state_.get()] {
    state->side_work.Close(Status(Code::kUnavailable, "the daemon stops", Reason::kNotRunning));
  });
  state_->server->Stop(kStopGrace);
  state_->side_work.Stop();
  state_->executor.Stop();
}

}  // namespace tensorbus::daemon
