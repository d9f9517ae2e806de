#include "tensorbus/cli/bench_protocol.h"

#include <cerrno>
#include <cstring>
#include <sys/socket.h>
#include <sys/uio.h>

#include "tensorbus/base/printable.h"

namespace tensorbus::cli {
namespace {

Status Gone() {
  return {Code::kUnavailable, "the other end has gone", Reason::kPeerLost};
}

Status Misfit() {
  return {Code::kInternal, "a message of another size: two builds are mixed", Reason::kMalformed};
}

/// One message out of two parts.
Status SendWhole(int fd, const void* head, std::size_t head_bytes, std::string_view text) {
  iovec parts[] = {{const_cast<void*>(head), head_bytes},
                   {const_cast<char*>(text.data()), text.size()}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = text.empty() ? 1 : 2;
  while (true) {
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent == static_cast<ssize_t>(head_bytes + text.size())) return {};
    if (sent < 0 && errno == EINTR) continue;
    return sent < 0 && errno != EPIPE && errno != ECONNRESET ? ErrnoStatus(errno, "send") : Gone();
  }
}

/// Bytes of the next message, of which at most `size` are put at `into`; never 0.
Result<std::size_t> ReceiveWhole(int fd, void* into, std::size_t size, int flags) {
  while (true) {
    const ssize_t got = ::recv(fd, into, size, flags | MSG_TRUNC);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return Status(Code::kDeadlineExceeded, "nothing there");
    return Gone();
  }
}

}  // namespace

Status SendBench(int fd, const BenchMessage& message) {
  return SendWhole(fd, &message, sizeof message, {});
}

Status SendBench(int fd, const BenchReply& reply) {
  const std::string text = Shortened(reply.text, kMaxBenchTextBytes);
  BenchReplyHead head = reply;
  head.text_bytes = static_cast<std::uint32_t>(text.size());
  return SendWhole(fd, &head, sizeof head, text);
}

Result<BenchMessage> ReceiveCommand(int fd) {
  BenchMessage message;
  TB_ASSIGN_OR_RETURN(const std::size_t bytes, ReceiveWhole(fd, &message, sizeof message, 0));
  return bytes == sizeof message ? Result<BenchMessage>(message) : Misfit();
}

Result<BenchReply> ReceiveReply(int fd) {
  BenchReply reply;
  BenchReplyHead& head = reply;
  std::string whole(sizeof head + kMaxBenchTextBytes, '\0');
  TB_ASSIGN_OR_RETURN(const std::size_t bytes,
                      ReceiveWhole(fd, whole.data(), whole.size(), MSG_DONTWAIT));
  if (bytes < sizeof head || bytes > whole.size()) return Misfit();
  std::memcpy(&head, whole.data(), sizeof head);
  if (bytes != sizeof head + head.text_bytes) return Misfit();
  reply.text = whole.substr(sizeof head, head.text_bytes);
  return reply;
}

BenchReply ReplyTo(BenchCommand command, const Status& status) {
  BenchReply reply;
  reply.command = command;
  reply.code = static_cast<std::uint32_t>(status.code());
  reply.reason = static_cast<std::uint32_t>(status.reason());
  if (!status.ok()) reply.text = status.message();
  return reply;
}

Status StatusOf(const BenchReply& reply) {
  if (reply.code == 0) return {};
  const bool known = reply.code <= static_cast<std::uint32_t>(Code::kUnauthenticated);
  const bool known_reason = reply.reason <= static_cast<std::uint32_t>(Reason::kBusy);
  return {known ? static_cast<Code>(reply.code) : Code::kUnknown, reply.text,
          known_reason ? static_cast<Reason>(reply.reason) : Reason::kNone};
}

}  // namespace tensorbus::cli
