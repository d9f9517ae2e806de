#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "tensorbus/transport/tcp_frame.h"

namespace tensorbus::transport::tcp {

/// A numeric address: "10.0.0.1:4711", "[fe80::1]:4711".
struct Address {
  std::string host;
  std::uint16_t port = 0;

  std::string ToString() const;
};

/// Reads "host:port" or "tcp://host:port". Hosts are numeric: a look-up could block. Error:
/// kInvalidArgument/kMalformed.
Result<Address> ParseAddress(const std::string& text);

/// A listening socket, non-blocking, close-on-exec. Port 0 lets the system pick.
Result<UniqueFd> Listen(const Address& address);
/// The port a socket is bound to.
Result<std::uint16_t> LocalPort(int fd);
/// Starts to connect and returns at once; writable means done or failed (SocketError()).
Result<UniqueFd> StartConnect(const Address& address);
/// Takes one connection; no value when none waits. Error: kResourceExhausted when descriptors ran
/// out.
Result<std::optional<UniqueFd>> Accept(int listener);
/// 0, or the errno of what went wrong on the socket.
int SocketError(int fd);

/// The failure of a connection that broke: kUnavailable/kPeerLost.
Status Lost(const std::string& peer, int error_number);

/// Outcome of one non-blocking transfer.
struct Transfer {
  std::size_t bytes = 0;
  bool would_block = false;
  bool closed = false;   ///< the peer closed its half
  int error_number = 0;  ///< the connection is broken
};

/// Takes frames off a socket, one at a time, never reading past the end of one. Confined.
class FrameReader {
 public:
  struct Frame {
    FrameType type;
    std::span<const std::byte> body;  ///< valid until the next Read()
  };

  /// No value when the socket has no more for now; go on at the next readiness.
  ///
  /// Errors: kUnavailable/kPeerLost when the connection ended, kInvalidArgument/kMalformed when the
  /// bytes are no frame.
  Result<std::optional<Frame>> Read(int fd, const std::string& peer);

 private:
  std::array<std::byte, kFrameHeaderBytes> header_bytes_ = {};
  std::size_t header_got_ = 0;
  FrameHeader header_;
  std::vector<std::byte> body_;
  std::size_t body_got_ = 0;
};

/// Bytes that wait to be sent. Confined.
class OutBuffer {
 public:
  void Append(std::span<const std::byte> bytes);
  bool empty() const { return sent_ == bytes_.size(); }
  /// Sends what the socket takes. `more` follows at once: the system may wait for it.
  Transfer Flush(int fd, bool more);

 private:
  std::vector<std::byte> bytes_;
  std::size_t sent_ = 0;
};

/// Most runs handed to the system in one call.
inline constexpr std::size_t kRunsPerCall = 64;

/// One sendmsg or recvmsg over several runs of memory.
Transfer SendRuns(int fd, std::span<const std::span<std::byte>> runs, bool more);
Transfer ReceiveRuns(int fd, std::span<const std::span<std::byte>> runs);

}  // namespace tensorbus::transport::tcp
