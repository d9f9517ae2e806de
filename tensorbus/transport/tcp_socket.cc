#include "tensorbus/transport/tcp_socket.h"

#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "tensorbus/base/check.h"

namespace tensorbus::transport::tcp {

namespace {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

/// Error: kInvalidArgument when the host is not numeric.
Result<SocketAddress> ToSocketAddress(const Address& address) {
  SocketAddress out;
  sockaddr_in v4 = {};
  sockaddr_in6 v6 = {};
  if (::inet_pton(AF_INET, address.host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(address.port);
    std::memcpy(&out.storage, &v4, sizeof v4);
    out.length = sizeof v4;
    return out;
  }
  if (::inet_pton(AF_INET6, address.host.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(address.port);
    std::memcpy(&out.storage, &v6, sizeof v6);
    out.length = sizeof v6;
    return out;
  }
  return Status(Code::kInvalidArgument,
                fmt::format("'{}' is not a numeric IPv4 or IPv6 address", address.host),
                Reason::kMalformed);
}

void SetOption(int fd, int level, int option, int value) {
  // A socket without a tuning is slower, not wrong.
  [[maybe_unused]] const int ignored = ::setsockopt(fd, level, option, &value, sizeof value);
}

/// Small frames go at once; a peer that vanished without a word is noticed within seconds.
void Tune(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 5000);
}

Transfer ToTransfer(ssize_t result) {
  if (result > 0) return {.bytes = static_cast<std::size_t>(result)};
  if (result == 0) return {.closed = true};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {.would_block = true};
  return {.error_number = errno};
}

msghdr Message(std::span<const std::span<std::byte>> runs,
               std::array<iovec, kRunsPerCall>& vectors) {
  TB_CHECK(!runs.empty() && runs.size() <= vectors.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    vectors[i] = {.iov_base = runs[i].data(), .iov_len = runs[i].size()};
  }
  msghdr message = {};
  message.msg_iov = vectors.data();
  message.msg_iovlen = runs.size();
  return message;
}

}  // namespace

std::string Address::ToString() const {
  const bool v6 = host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

Result<Address> ParseAddress(const std::string& text) {
  constexpr std::string_view kScheme = "tcp://";
  std::string_view rest = text;
  if (rest.starts_with(kScheme)) rest.remove_prefix(kScheme.size());
  const std::size_t colon = rest.rfind(':');
  const auto bad = [&] {
    return Status(Code::kInvalidArgument,
                  fmt::format("'{}' is not host:port with a numeric host", text),
                  Reason::kMalformed);
  };
  if (colon == std::string_view::npos) return bad();
  std::string_view host = rest.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const std::string_view digits = rest.substr(colon + 1);
  Address address = {.host = std::string(host)};
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), address.port);
  if (error != std::errc() || end != digits.data() + digits.size()) return bad();
  if (!ToSocketAddress(address).ok()) return bad();
  return address;
}

Result<UniqueFd> Listen(const Address& address) {
  TB_ASSIGN_OR_RETURN(const SocketAddress at, ToSocketAddress(address));
  UniqueFd fd(::socket(at.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  SetOption(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(fd.get(), at.get(), at.length) != 0) {
    return ErrnoStatus(errno, "bind " + address.ToString());
  }
  if (::listen(fd.get(), SOMAXCONN) != 0) return ErrnoStatus(errno, "listen");
  return fd;
}

Result<std::uint16_t> LocalPort(int fd) {
  sockaddr_storage storage = {};
  socklen_t length = sizeof storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    return ErrnoStatus(errno, "getsockname");
  }
  // The port is at the same place for both families.
  sockaddr_in v4 = {};
  std::memcpy(&v4, &storage, sizeof v4);
  return ntohs(v4.sin_port);
}

Result<UniqueFd> StartConnect(const Address& address) {
  TB_ASSIGN_OR_RETURN(const SocketAddress at, ToSocketAddress(address));
  UniqueFd fd(::socket(at.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  Tune(fd.get());
  if (::connect(fd.get(), at.get(), at.length) != 0 && errno != EINPROGRESS) {
    return Lost(address.ToString(), errno);
  }
  return fd;
}

Result<std::optional<UniqueFd>> Accept(int listener) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.valid()) {
    Tune(fd.get());
    return std::optional<UniqueFd>(std::move(fd));
  }
  if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
    return ErrnoStatus(errno, "accept");
  }
  return std::optional<UniqueFd>();
}

int SocketError(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

Status Lost(const std::string& peer, int error_number) {
  const std::string why =
      error_number == 0 ? "it closed the connection" : std::strerror(error_number);
  return {Code::kUnavailable, fmt::format("peer {} is lost: {}", peer, why), Reason::kPeerLost,
          error_number};
}

Result<std::optional<FrameReader::Frame>> FrameReader::Read(int fd, const std::string& peer) {
  const auto fill = [&](std::span<std::byte> into, std::size_t& got) -> Result<bool> {
    while (got < into.size()) {
      const Transfer transfer =
          ToTransfer(::recv(fd, into.data() + got, into.size() - got, MSG_DONTWAIT));
      if (transfer.would_block) return false;
      if (transfer.bytes == 0) return Lost(peer, transfer.error_number);
      got += transfer.bytes;
    }
    return true;
  };
  if (header_got_ < header_bytes_.size()) {
    TB_ASSIGN_OR_RETURN(const bool whole, fill(header_bytes_, header_got_));
    if (!whole) return std::optional<Frame>();
    TB_ASSIGN_OR_RETURN(header_, ParseHeader(header_bytes_));
    body_.resize(header_.body_bytes);
    body_got_ = 0;
  }
  TB_ASSIGN_OR_RETURN(const bool whole, fill(body_, body_got_));
  if (!whole) return std::optional<Frame>();
  header_got_ = 0;
  return std::optional<Frame>({.type = header_.type, .body = body_});
}

void OutBuffer::Append(std::span<const std::byte> bytes) {
  if (empty()) {
    bytes_.clear();
    sent_ = 0;
  }
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

Transfer OutBuffer::Flush(int fd, bool more) {
  while (!empty()) {
    const Transfer transfer = ToTransfer(::send(fd, bytes_.data() + sent_, bytes_.size() - sent_,
                                                MSG_NOSIGNAL | (more ? MSG_MORE : 0)));
    if (transfer.bytes == 0) return transfer;
    sent_ += transfer.bytes;
  }
  return {};
}

Transfer SendRuns(int fd, std::span<const std::span<std::byte>> runs, bool more) {
  std::array<iovec, kRunsPerCall> vectors;
  const msghdr message = Message(runs, vectors);
  return ToTransfer(::sendmsg(fd, &message, MSG_NOSIGNAL | (more ? MSG_MORE : 0)));
}

Transfer ReceiveRuns(int fd, std::span<const std::span<std::byte>> runs) {
  std::array<iovec, kRunsPerCall> vectors;
  msghdr message = Message(runs, vectors);
  return ToTransfer(::recvmsg(fd, &message, MSG_DONTWAIT));
}

}  // namespace tensorbus::transport::tcp
