#pragma once

#include <chrono>
#include <optional>
#include <poll.h>
#include <span>
#include <string>
#include <sys/socket.h>
#include <utility>
#include <vector>

#include "tensorbus/transport/tcp_auth.h"
#include "tensorbus/transport/tcp_socket.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::transport::tcp {

/// The other end of a connection, played by a test frame by frame. Waits have a deadline; after the
/// first failure everything returns nothing.
class ScriptedEnd {
 public:
  explicit ScriptedEnd(UniqueFd fd) : fd_(std::move(fd)) {}

  void Send(std::span<const std::byte> bytes) {
    while (!bytes.empty() && Wait(POLLOUT)) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }
  /// The next frame: its type and a copy of its body. None when the peer closed or takes too long.
  std::optional<std::pair<FrameType, std::vector<std::byte>>> Receive() {
    while (Wait(POLLIN)) {
      const auto frame = reader_.Read(fd_.get(), "peer");
      if (!frame.ok()) return std::nullopt;
      if (frame->has_value()) {
        return std::pair((*frame)->type, std::vector((*frame)->body.begin(), (*frame)->body.end()));
      }
    }
    return std::nullopt;
  }
  void Close() { fd_.reset(); }

 private:
  bool Wait(short events) {
    pollfd wait = {.fd = fd_.get(), .events = events, .revents = 0};
    return ::poll(&wait, 1, 20'000) == 1;
  }

  UniqueFd fd_;
  FrameReader reader_;
};

/// A listener whose connections the test plays.
class ScriptedSource {
 public:
  ScriptedSource() {
    auto fd = Listen({.host = "127.0.0.1", .port = 0});
    TB_CHECK(fd.ok());
    fd_ = std::move(*fd);
    port_ = *LocalPort(fd_.get());
  }
  std::string endpoint() const {
    return "tcp://" + Address{.host = "127.0.0.1", .port = port_}.ToString();
  }
  ScriptedEnd Accept() {
    pollfd wait = {.fd = fd_.get(), .events = POLLIN, .revents = 0};
    TB_CHECK(::poll(&wait, 1, 20'000) == 1);
    auto fd = tcp::Accept(fd_.get());
    TB_CHECK(fd.ok() && fd->has_value());
    return ScriptedEnd(std::move(**fd));
  }
  /// Accept() and the source's half of a handshake that succeeds.
  ScriptedEnd AcceptTrusted(const std::string& token) {
    ScriptedEnd end = Accept();
    const auto hello = end.Receive();
    TB_CHECK(hello.has_value());
    const auto parsed = ParseHello(hello->second);
    TB_CHECK(parsed.ok());
    const auto nonce = MakeNonce();
    TB_CHECK(nonce.ok());
    end.Send(Encode(Challenge{.nonce = *nonce, .mac = SourceMac(token, parsed->nonce, *nonce)}));
    TB_CHECK(end.Receive().has_value());
    end.Send(EncodeWelcome());
    return end;
  }

 private:
  UniqueFd fd_;
  std::uint16_t port_ = 0;
};

/// Connects to a transport as a target would.
inline ScriptedEnd ConnectTo(const std::string& endpoint) {
  const auto address = ParseAddress(endpoint);
  TB_CHECK(address.ok());
  auto fd = StartConnect(*address);
  TB_CHECK(fd.ok());
  return ScriptedEnd(std::move(*fd));
}

}  // namespace tensorbus::transport::tcp
