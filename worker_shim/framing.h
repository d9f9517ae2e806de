#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "worker_shim/wire.h"

// Frames on a UNIX stream socket, with descriptors. Both ends use these; none of the functions
// cares whether the socket is blocking or not.
namespace tensorbus::wire {

/// One frame as it came in. Owns the descriptors that rode on it.
struct Frame {
  std::uint64_t request = 0;
  MessageType type = MessageType::kPing;
  std::vector<std::byte> body;
  std::vector<UniqueFd> fds;
};

/// Puts frames together from whatever pieces a socket gives. Confined.
class FrameReader {
 public:
  /// Frames with a longer body are refused before anything is allocated for them.
  explicit FrameReader(std::uint32_t max_body_bytes = kMaxBodyBytes)
      : max_body_bytes_(max_body_bytes) {}

  /// Takes what `socket` has, never waiting: the next frame, or none yet.
  ///
  /// Errors: kUnavailable/kPeerLost when the other end closed; kInvalidArgument/kMalformed. After
  /// an error the stream is lost and every further call repeats it.
  Result<std::optional<Frame>> Read(int socket);

 private:
  Status Receive(int socket);
  Status AcceptHeader();

  std::uint32_t max_body_bytes_;
  FrameHeader header_;
  std::size_t header_filled_ = 0;
  std::size_t body_filled_ = 0;
  bool would_block_ = false;
  Frame frame_;
  Status failure_;
};

/// Holds frames until a socket takes them. Confined.
class FrameWriter {
 public:
  /// Queues one frame; owns `fds` until they are sent. At most kMaxFrameFds and kMaxBodyBytes.
  Status Add(MessageType type, std::uint64_t request, std::vector<std::byte> body,
             std::vector<UniqueFd> fds = {});

  /// Writes what `socket` takes, never waiting: true when nothing is left.
  ///
  /// Errors: kUnavailable/kPeerLost when the other end closed.
  Result<bool> Flush(int socket);

  bool empty() const { return queue_.empty(); }
  std::uint64_t queued_bytes() const { return queued_bytes_; }

 private:
  struct Pending {
    FrameHeader header;
    std::vector<std::byte> body;
    std::vector<UniqueFd> fds;
    std::size_t sent = 0;  ///< of header and body together
  };

  std::deque<Pending> queue_;
  std::uint64_t queued_bytes_ = 0;
};

/// Waits until `socket` is ready for `events` (POLLIN, POLLOUT) and says for which.
///
/// Errors: kDeadlineExceeded.
Result<short> WaitForSocket(int socket, short events, TimePoint deadline);

/// Writes everything in `writer`, waiting as long as `deadline` allows.
Status FlushBefore(int socket, FrameWriter& writer, TimePoint deadline);

/// The next frame, waiting as long as `deadline` allows. A frame that has begun stays in `reader`.
Result<Frame> ReadBefore(int socket, FrameReader& reader, TimePoint deadline);

}  // namespace tensorbus::wire
