#pragma once

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tensorbus/transport/faulty_transport.h"
#include "tensorbus/transport/landing.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

struct WorldOptions {
  LandingHook landing_hook = nullptr;
  /// Budget of both ends together, where a transport stages bytes.
  std::uint64_t staging_bytes = std::uint64_t{256} << 20;
  /// Threads that write into a target.
  unsigned threads = 3;
};

/// Two connected ends of one kind of transport; one object may be both.
class World {
 public:
  virtual ~World() = default;
  virtual Transport& source() = 0;
  virtual Transport& target() = 0;
  /// What PullOptions::peer of the target must say to reach the source.
  virtual std::string peer() = 0;
  /// Takes the target end out, for decoration.
  virtual std::unique_ptr<Transport> TakeTarget() = 0;
};

using WorldFactory = std::function<std::unique_ptr<World>(WorldOptions)>;

std::unique_ptr<World> MakeFakeWorld(WorldOptions options);
std::unique_ptr<World> MakeShmWorld(WorldOptions options);
/// Two transports on the loopback.
std::unique_ptr<World> MakeTcpWorld(WorldOptions options);

/// One of the above with a FaultyTransport around its target.
std::unique_ptr<World> MakeFaultyWorld(const WorldFactory& make, std::vector<Fault> faults,
                                       WorldOptions options = {});
std::unique_ptr<World> MakeFaultlessFaultyWorld(WorldOptions options);

/// Runs Pull() and waits for its outcome; a pull that never ends is a failure after a minute.
Result<PullResult> PullAndWait(Transport& transport, const RouteKey& key, RouteEnd target,
                               PullOptions options);

/// Options with a deadline that only a hanging test reaches and the capability of TestRoutes.
PullOptions Unhurried(std::string peer, Proof proof = Proof::kReadback);

}  // namespace tensorbus::transport
