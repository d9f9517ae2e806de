#pragma once

#include <memory>
#include <string>

#include "tensorbus/transport/tcp_options.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// Moves routes between hosts, straight from and into tensor memory.
///
/// The target asks for windows of a route's byte stream over several connections, within a byte
/// credit; the source answers each with the bytes, their XXH3-64 and the digest of every block part
/// it sent. Both ends prove that they know the shared token before anything else is believed. The
/// bytes themselves are not encrypted.
///
/// Staged are one scratch per I/O thread and, for foreign memory, at most 1 MiB per connection.
class TcpTransport final : public Transport {
 public:
  /// Listens and starts the I/O threads.
  ///
  /// Errors: kInvalidArgument (no token, an address that is not numeric, a bound of 0);
  /// kResourceExhausted/kOutOfMemory when the scratch exceeds what the staging budget has free;
  /// what the system says about listening.
  static Result<std::unique_ptr<TcpTransport>> Create(TcpOptions options);
  /// Fails what is not done with kCancelled, runs its Done, closes all connections, joins.
  ~TcpTransport() override;
  TcpTransport(const TcpTransport&) = delete;
  TcpTransport& operator=(const TcpTransport&) = delete;

  std::string_view name() const override { return "tcp"; }
  std::string endpoint() const override;
  /// Peers that are remembered; for tests.
  std::size_t peer_count() const;
  Status Expose(const RouteKey& key, RouteEnd source) override;
  void Withdraw(const RouteKey& key) override;
  void Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) override;
  void Cancel(SessionId session) override;

 private:
  class Impl;

  explicit TcpTransport(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorbus::transport
