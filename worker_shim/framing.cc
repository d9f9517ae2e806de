#include "worker_shim/framing.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace tensorbus::wire {
namespace {

/// A body grows by this much at a time, so that an announced length alone costs no memory.
constexpr std::size_t kBodyStepBytes = std::size_t{1} << 20;

Status Malformed(std::string_view what) {
  return {Code::kInvalidArgument, fmt::format("frame on the local socket: {}", what),
          Reason::kMalformed};
}

Status PeerLost(int error) {
  return {Code::kUnavailable,
          error == 0 ? std::string("the other end of the local socket closed")
                     : fmt::format("local socket: {}", std::strerror(error)),
          Reason::kPeerLost, error};
}

bool WouldBlock(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

/// Takes the descriptors of a received message, all of them, before anything is judged.
std::vector<UniqueFd> TakeFds(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr;
       item = CMSG_NXTHDR(&message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

Result<std::optional<Frame>> FrameReader::Read(int socket) {
  if (!failure_.ok()) return failure_;
  while (header_filled_ < sizeof header_ || body_filled_ < header_.body_bytes) {
    failure_ = Receive(socket);
    if (!failure_.ok()) return failure_;
    if (would_block_) return std::optional<Frame>();
  }
  Frame frame = std::exchange(frame_, Frame());
  header_filled_ = 0;
  body_filled_ = 0;
  return std::optional<Frame>(std::move(frame));
}

// One recvmsg, for the rest of the header or a step of the body: never beyond the frame, so that
// descriptors of the next one cannot arrive with this one.
Status FrameReader::Receive(int socket) {
  iovec part = {};
  const bool in_header = header_filled_ < sizeof header_;
  if (in_header) {
    part = {reinterpret_cast<std::byte*>(&header_) + header_filled_,
            sizeof header_ - header_filled_};
  } else {
    const std::size_t step =
        std::min<std::size_t>(header_.body_bytes - body_filled_, kBodyStepBytes);
    frame_.body.resize(body_filled_ + step);
    part = {frame_.body.data() + body_filled_, step};
  }
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFrameFds * sizeof(int))> control;
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  would_block_ = got < 0 && WouldBlock(errno);
  if (would_block_) return {};
  if (got < 0) return PeerLost(errno);

  std::vector<UniqueFd> fds = TakeFds(message);
  if (got == 0) return PeerLost(0);
  if ((message.msg_flags & MSG_CTRUNC) != 0) return Malformed("too many descriptors");
  if (!fds.empty()) {
    if (!in_header || header_filled_ != 0) return Malformed("descriptors inside a frame");
    frame_.fds = std::move(fds);
  }
  if (!in_header) {
    body_filled_ += static_cast<std::size_t>(got);
    return {};
  }
  header_filled_ += static_cast<std::size_t>(got);
  return header_filled_ == sizeof header_ ? AcceptHeader() : Status();
}

Status FrameReader::AcceptHeader() {
  if (header_.body_bytes > max_body_bytes_) {
    return Malformed(
        fmt::format("{} bytes long, at most {} are allowed", header_.body_bytes, max_body_bytes_));
  }
  if (header_.fd_count != frame_.fds.size()) {
    return Malformed(
        fmt::format("announces {} descriptors, {} came", header_.fd_count, frame_.fds.size()));
  }
  frame_.type = static_cast<MessageType>(header_.type);
  frame_.request = header_.request;
  return {};
}

Status FrameWriter::Add(MessageType type, std::uint64_t request, std::vector<std::byte> body,
                        std::vector<UniqueFd> fds) {
  if (body.size() > kMaxBodyBytes || fds.size() > kMaxFrameFds) {
    return {Code::kResourceExhausted,
            fmt::format("a message of {} bytes and {} descriptors; at most {} and {} fit",
                        body.size(), fds.size(), kMaxBodyBytes, kMaxFrameFds)};
  }
  Pending pending;
  pending.header.body_bytes = static_cast<std::uint32_t>(body.size());
  pending.header.type = static_cast<std::uint16_t>(type);
  pending.header.fd_count = static_cast<std::uint16_t>(fds.size());
  pending.header.request = request;
  pending.body = std::move(body);
  pending.fds = std::move(fds);
  queued_bytes_ += sizeof(FrameHeader) + pending.body.size();
  queue_.push_back(std::move(pending));
  return {};
}

Result<bool> FrameWriter::Flush(int socket) {
  while (!queue_.empty()) {
    Pending& frame = queue_.front();
    std::array<iovec, 2> parts = {};
    std::size_t part_count = 0;
    const std::size_t total = sizeof(FrameHeader) + frame.body.size();
    if (frame.sent < sizeof(FrameHeader)) {
      parts[part_count++] = {reinterpret_cast<std::byte*>(&frame.header) + frame.sent,
                             sizeof(FrameHeader) - frame.sent};
    }
    const std::size_t body_sent =
        frame.sent > sizeof(FrameHeader) ? frame.sent - sizeof(FrameHeader) : 0;
    if (body_sent < frame.body.size()) {
      parts[part_count++] = {frame.body.data() + body_sent, frame.body.size() - body_sent};
    }
    msghdr message = {};
    message.msg_iov = parts.data();
    message.msg_iovlen = part_count;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFrameFds * sizeof(int))> control = {};
    if (frame.sent == 0 && !frame.fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(frame.fds.size() * sizeof(int));
      cmsghdr* item = CMSG_FIRSTHDR(&message);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(frame.fds.size() * sizeof(int));
      for (std::size_t i = 0; i < frame.fds.size(); ++i) {
        const int fd = frame.fds[i].get();
        std::memcpy(CMSG_DATA(item) + i * sizeof(int), &fd, sizeof fd);
      }
    }
    const ssize_t sent = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (WouldBlock(errno)) return false;
      return PeerLost(errno);
    }
    frame.sent += static_cast<std::size_t>(sent);
    queued_bytes_ -= static_cast<std::uint64_t>(sent);
    if (frame.sent == total) queue_.pop_front();
  }
  return true;
}

Result<short> WaitForSocket(int socket, short events, TimePoint deadline) {
  while (true) {
    const Nanos left = deadline - std::chrono::steady_clock::now();
    const auto left_ms =
        std::chrono::ceil<std::chrono::milliseconds>(std::max(left, Nanos::zero())).count();
    pollfd item = {socket, events, 0};
    const int ready =
        ::poll(&item, 1, static_cast<int>(std::min<std::int64_t>(left_ms, 60 * 60 * 1000)));
    if (ready > 0) return item.revents;
    if (ready < 0 && errno != EINTR) return ErrnoStatus(errno, "poll of the local socket");
    if (ready == 0 && left <= Nanos::zero()) {
      return Status(Code::kDeadlineExceeded, "no answer on the local socket in time");
    }
  }
}

Status FlushBefore(int socket, FrameWriter& writer, TimePoint deadline) {
  while (true) {
    TB_ASSIGN_OR_RETURN(const bool done, writer.Flush(socket));
    if (done) return {};
    TB_RETURN_IF_ERROR(WaitForSocket(socket, POLLOUT, deadline).status());
  }
}

Result<Frame> ReadBefore(int socket, FrameReader& reader, TimePoint deadline) {
  while (true) {
    TB_ASSIGN_OR_RETURN(std::optional<Frame> frame, reader.Read(socket));
    if (frame.has_value()) return *std::move(frame);
    TB_RETURN_IF_ERROR(WaitForSocket(socket, POLLIN, deadline).status());
  }
}

}  // namespace tensorbus::wire
