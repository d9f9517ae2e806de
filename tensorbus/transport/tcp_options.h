#pragma once

#include <chrono>
#include <cstdint>
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
  /// Shared secret of all agents of a deployment. Required; never sent.
  std::string token = {};
  unsigned io_threads = 2;
  unsigned streams_per_peer = 2;  ///< connections to each peer that is pulled from
  std::uint64_t window_bytes = std::uint64_t{1} << 20;   ///< of one request, at most 64 MiB
  std::uint64_t credit_bytes = std::uint64_t{16} << 20;  ///< of one pull, asked for and not landed
  /// Buffer of each I/O thread for runs too short for the socket. All that is ever staged.
  std::uint64_t scratch_bytes = 256 << 10;
  /// Where the scratch is counted; none: a budget of its own of the default size.
  std::shared_ptr<StagingBudget> staging = nullptr;
  Nanos handshake_timeout = std::chrono::seconds(5);
  unsigned connections_max = 1024;     ///< accepted ones
  LandingHook landing_hook = nullptr;  ///< for tests
};

}  // namespace tensorbus::transport
