#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tensorbus/base/clock.h"
#include "tensorbus/transport/landing.h"
#include "tensorbus/transport/staging_budget.h"

namespace tensorbus::transport {

struct TcpOptions {
  /// Numeric host and port to listen on; port 0 lets the system pick.
  std::string listen = "127.0.0.1:0";
  /// Host that endpoint() names, for listening on "0.0.0.0" or "::"; empty: the one listened on.
  std::string advertise_host = {};
  /// Shared secret of all agents of a deployment. Required, unless `token_source` is there; never
  /// sent.
  std::string token = {};
  /// Asked for the secret at every handshake instead, for a process that learns it after it began
  /// to listen; until then it says "" and handshakes are refused. Thread-safe.
  std::function<std::string()> token_source = nullptr;
  unsigned io_threads = 2;
  unsigned streams_per_peer = 2;  ///< connections to each peer that is pulled from
  std::uint64_t window_bytes = std::uint64_t{1} << 20;   ///< of one request, at most 64 MiB
  std::uint64_t credit_bytes = std::uint64_t{16} << 20;  ///< of one pull, asked for and not landed
  /// Buffer of each I/O thread for runs too short for the socket. All that is ever staged, but for
  /// foreign memory: of that 1 MiB for each connection that is moving it.
  std::uint64_t scratch_bytes = 256 << 10;
  /// Where the scratch is counted; none: a budget of its own of the default size.
  std::shared_ptr<StagingBudget> staging = nullptr;
  Nanos handshake_timeout = std::chrono::seconds(5);
  unsigned connections_max = 1024;     ///< accepted ones
  unsigned peers_max = 1024;           ///< kept connected to; more only while they are pulled from
  LandingHook landing_hook = nullptr;  ///< for tests

  std::string Token() const { return token_source ? token_source() : token; }
};

}  // namespace tensorbus::transport
