#include "tensorbus/cli/bench_protocol.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

namespace tensorbus::cli {
namespace {

Status Gone() {
  return {Code::kUnavailable, "the other end has gone", Reason::kPeerLost};
}

template <typename Message>
Status SendWhole(int fd, const Message& message) {
  while (true) {
    const ssize_t sent = ::send(fd, &message, sizeof message, MSG_NOSIGNAL);
    if (sent == static_cast<ssize_t>(sizeof message)) return {};
    if (sent < 0 && errno == EINTR) continue;
    return sent < 0 && errno != EPIPE && errno != ECONNRESET ? ErrnoStatus(errno, "send") : Gone();
  }
}

template <typename Message>
Result<Message> ReceiveWhole(int fd, int flags) {
  Message message;
  while (true) {
    const ssize_t got = ::recv(fd, &message, sizeof message, flags);
    if (got == static_cast<ssize_t>(sizeof message)) return message;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return Status(Code::kDeadlineExceeded, "nothing there");
    if (got > 0) {
      return Status(Code::kInternal, "a message of another size: two builds are mixed",
                    Reason::kMalformed);
    }
    return Gone();
  }
}

}  // namespace

Status SendBench(int fd, const BenchMessage& message) {
  return SendWhole(fd, message);
}

Status SendBench(int fd, const BenchReply& reply) {
  return SendWhole(fd, reply);
}

Result<BenchMessage> ReceiveCommand(int fd) {
  return ReceiveWhole<BenchMessage>(fd, 0);
}

Result<BenchReply> ReceiveReply(int fd) {
  return ReceiveWhole<BenchReply>(fd, MSG_DONTWAIT);
}

BenchReply ReplyTo(BenchCommand command, const Status& status) {
  BenchReply reply;
  reply.command = command;
  reply.code = static_cast<std::uint32_t>(status.code());
  reply.reason = static_cast<std::uint32_t>(status.reason());
  if (!status.ok()) SetText(reply, status.message());
  return reply;
}

Status StatusOf(const BenchReply& reply) {
  if (reply.code == 0) return {};
  const bool known = reply.code <= static_cast<std::uint32_t>(Code::kUnauthenticated);
  const bool known_reason = reply.reason <= static_cast<std::uint32_t>(Reason::kBusy);
  return {known ? static_cast<Code>(reply.code) : Code::kUnknown,
          std::string(reply.text, ::strnlen(reply.text, sizeof reply.text)),
          known_reason ? static_cast<Reason>(reply.reason) : Reason::kNone};
}

void SetText(BenchReply& reply, std::string_view text) {
  const std::size_t size = std::min(text.size(), sizeof reply.text - 1);
  std::memcpy(reply.text, text.data(), size);
  reply.text[size] = 0;
}

}  // namespace tensorbus::cli
