#include "tensorbus/daemon/daemon.h"

#include <chrono>
#include <cstring>
#include <fmt/format.h>

#include "tensorbus/base/metrics.h"
#include "tensorbus/base/stop_guard.h"
#include "tensorbus/daemon/secret.h"
#include "tensorbus/daemon/side_work.h"

namespace tensorbus::daemon {

namespace {

using namespace std::chrono_literals;

constexpr Nanos kStopGrace = 2s;
/// For everything that is waited for when a daemon stops.
constexpr Nanos kStopLimit = 60s;
/// Sessions of one life are numbered from a number drawn by chance, so far apart that two lives do
/// not meet and below 2^53, which JSON keeps.
constexpr int kSessionBitsOfLife = 20;

Result<std::string> RandomToken() {
  TB_ASSIGN_OR_RETURN(const std::string secret, RandomSecret());
  std::string token;
  for (const char byte : secret) token += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return token;
}

Result<std::uint64_t> FirstSession() {
  TB_ASSIGN_OR_RETURN(const std::string chance, RandomSecret());
  std::uint32_t life = 0;
  std::memcpy(&life, chance.data(), sizeof life);
  return (std::uint64_t{life} << kSessionBitsOfLife) + 1;
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
  if (options.core.first_session <= 1) {
    TB_ASSIGN_OR_RETURN(options.core.first_session, FirstSession());
  }
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
  StopGuard guard("daemon", kStopLimit);
  guard.At("calls under way");
  // The executor runs until the server is down: open calls are answered by the core. What waits for
  // side work is answered now, so that the server need not wait for that.
  state_->executor.Post([state = state_.get()] {
    state->side_work.Close(Status(Code::kUnavailable, "the daemon stops", Reason::kNotRunning));
  });
  state_->server->Stop(kStopGrace);
  guard.At("work on layouts");
  state_->side_work.Stop();
  guard.At("the daemon's executor");
  state_->executor.Stop();
}

}  // namespace tensorbus::daemon
