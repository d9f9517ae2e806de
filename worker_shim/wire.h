#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/ids.h"
#include "tensorbus/types/piece.h"
#include "tensorbus/types/strided.h"

// What a worker process and its agent say to each other over a UNIX stream socket. Little-endian
// binary, every field bounds-checked on receipt. A frame is a FrameHeader and a body; descriptors
// ride on the header's first byte (SCM_RIGHTS). docs/wire.md has the byte layout and the rules for
// changing it.
namespace tensorbus::wire {

/// What worker library and agent speak. Peers of another number are refused; docs/wire.md says when
/// it grows.
inline constexpr std::uint32_t kProtocol = 4;
/// Most bytes of one frame's body (a registration of 140,000 tensors takes about 30 MiB).
inline constexpr std::uint32_t kMaxBodyBytes = 256U << 20;
/// Most descriptors on one frame.
inline constexpr std::uint32_t kMaxFrameFds = 16;
/// Most segments (and so descriptors) one rank may attach. One arena is the usual case.
inline constexpr std::uint32_t kMaxSegments = 65536;
/// Most pieces of one registration, and most ranges of one bucket order.
inline constexpr std::uint32_t kMaxPieces = 8'000'000;
inline constexpr std::uint32_t kMaxBucketRanges = 1U << 20;
/// Most bytes of a text for people (a Status' message, an agent's name); names are bounded by
/// kMaxNameBytes.
inline constexpr std::uint32_t kMaxTextBytes = 16384;

enum class MessageType : std::uint16_t {
  // Worker to agent.
  kHello = 1,          ///< first frame; fd 0: the control page
  kAttachSegment = 2,  ///< one mapped segment each; fd 0: its memory
  kRegister = 3,       ///< tensors, pieces; after all segments
  kPublish = 4,
  kRequestRelease = 5,  ///< the producer wants to write its memory again
  kUpdate = 6,          ///< the consumer asks for a version
  kCancelUpdate = 7,
  kHookDone = 8,    ///< answer to kFence, kFlipBegin or kLive
  kBucketDone = 9,  ///< answer to kPack or kUnpack
  kClaim = 10,      ///< "which version do I hold?": proven by digest
  kGoodbye = 11,    ///< leaving on purpose
  kPing = 12,
  kExplain = 13,  ///< what does my request of this number wait for?
  // Agent to worker.
  kWelcome = 64,       ///< answer to kHello
  kReply = 65,         ///< plain answer to a request: a Status
  kRegistered = 66,    ///< answer to kRegister
  kReleased = 67,      ///< event: a version's memory may be written again (or why it failed)
  kFence = 68,         ///< in_place: stop using the weights until the flip
  kFlipBegin = 69,     ///< shadow: stop at a step edge, the copy or swap follows
  kLive = 70,          ///< the version is live: reset caches, go on
  kUpdated = 71,       ///< answer to kUpdate, after kLive was answered
  kPack = 72,          ///< bucket mode: gather these byte ranges into a bucket
  kUnpack = 73,        ///< bucket mode: scatter a bucket into these byte ranges
  kAttachBucket = 74,  ///< fd 0: a shared bucket
  kClaimed = 75,       ///< answer to kClaim
  kPong = 76,
  kBrokenOff = 77,  ///< event, the last frame: why the agent closes; its body is a Reply
  kExplained = 78,  ///< answer to kExplain, and to nothing else; its body is a Reply
};

struct FrameHeader {
  std::uint32_t body_bytes = 0;
  std::uint16_t type = 0;
  std::uint16_t fd_count = 0;
  /// Chosen by whoever asks, nonzero; an answer repeats it. 0 for events that nobody answers.
  std::uint64_t request = 0;
};
static_assert(sizeof(FrameHeader) == 16);

/// One page of shared memory per worker, made by the worker, mapped by both. Counters only grow.
struct ControlPage {
  static constexpr std::uint32_t kMagic = 0x54425043;  // "TBPC"
  std::uint32_t magic = kMagic;
  std::uint32_t protocol = kProtocol;
  /// Bumped by the worker before its first write after a publish (the optimizer's pre-step hook).
  /// The agent reads it at publish, before the first and after the last byte of a session: a change
  /// means a torn read.
  std::atomic<std::uint64_t> write_count{0};
  /// Written by the agent: the newest version whose memory the producer may overwrite, and the live
  /// one.
  std::atomic<std::uint64_t> released_version{0};
  std::atomic<std::uint64_t> live_version{0};
};
inline constexpr std::uint64_t kControlPageBytes = 4096;
static_assert(sizeof(ControlPage) <= kControlPageBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// ---- bodies
// ------------------------------------------------------------------------------------------

struct Hello {
  std::uint32_t protocol = kProtocol;
  RankIdentity identity;
  std::uint32_t pid = 0;
  std::string library;  ///< "tensorbus 0.1.0 python"
};

struct Welcome {
  Status status;
  std::uint32_t protocol = kProtocol;
  std::string agent;                ///< the agent's name, for messages
  std::uint64_t staging_bytes = 0;  ///< its staging budget
};

/// Memory of one segment. Mapped: the frame carries the descriptor. Private: `address` in the
/// worker.
struct AttachSegment {
  std::uint32_t segment = 0;  ///< index, in order from 0
  bool mapped = false;
  std::uint64_t bytes = 0;
  std::uint64_t address =
      0;  ///< where the segment begins in the worker; also for mapped ones (messages, checks)
};

/// What a slow consumer may cost the producer.
enum class SlowConsumer : std::uint8_t {
  kWait =
      1,  ///< memory is held until `min_replicas` replicas and all present ones have the version
  kSkip = 2,  ///< memory is given back as soon as running sessions end; who has not started takes a
              ///< later one
  kSnapshot = 3,  ///< the agent copies the shard at publish and gives the memory back at once
};

struct Publish {
  Version version;
  SlowConsumer policy = SlowConsumer::kWait;
  std::uint32_t min_replicas = 1;  ///< with kWait: hold at least until this many replicas have it
  bool receipts = false;  ///< make source receipts at publish (always done for proof `stream`)
  std::uint32_t keep_last = 0;  ///< with kSnapshot: how many snapshots stay for rollback
};

/// What a producer was before its agent went away, for the next one. All zero: it is new.
struct Return {
  ChannelEpoch epoch;  ///< that it was part of
  Version published;   ///< the newest version that was accepted
  Version publishing;  ///< a newer one whose publish was not answered
  Publish held;        ///< what its memory still holds, and was not released; version 0: nothing
  std::uint64_t write_count = 0;  ///< when `held` was published
};

struct Register {
  Registration registration;
  FlipMode flip = FlipMode::kInPlace;
  Proof proof = Proof::kReadback;
  /// Consumer: its memory may be a mixture of versions, because an agent went away while it wrote.
  bool dirty = false;
  /// Consumer: logical tensors of the channel it deliberately does not take. Names it neither
  /// covers nor leaves out are an error.
  std::vector<std::string> leave_out;
  /// 0: best that works. Otherwise a MemoryMode that private segments must use (mapped ones are
  /// always mapped).
  std::uint8_t private_mode = 0;
  Return back;  ///< producer
};

struct Registered {
  Status status;
  MemoryMode mode = MemoryMode::kMapped;
  std::string why;               ///< why this mode; for people
  double expected_gb_per_s = 0;  ///< rough speed of this mode on this host, 0 if unknown
  ChannelEpoch epoch;
  /// The newest version of the channel; of a job that began anew, the newest before it did. The
  /// next one to publish is above it.
  Version latest_version;
  double register_seconds = 0;
  double prefault_seconds = 0;
};

struct RequestRelease {
  Version version;
  std::uint64_t timeout_ms = 0;
};

struct Released {
  Version version;
  Status status;
};

enum class Selector : std::uint8_t { kLatest = 1, kNext = 2, kPinned = 3 };

struct Update {
  Selector selector = Selector::kLatest;
  Version version;  ///< for kPinned
  std::uint64_t timeout_ms = 0;
};

/// kFence, kFlipBegin and kLive: the worker runs its hook and answers kHookDone with the same
/// request.
struct HookEvent {
  SessionId session;
  Version version;
  std::uint64_t timeout_ms = 0;
};

struct HookDone {
  Status status;
};

struct Updated {
  Status status;
  Version version;  ///< now live; unchanged from before when status failed
  SessionId session;
  std::uint64_t bytes = 0;  ///< that arrived at this rank
  double seconds = 0;       ///< from the session's start to the flip
  double copy_seconds = 0;  ///< first byte read to last byte checked
  DigestSum digest;         ///< of all that arrived at this rank
};

/// One stretch of a box's row-major bytes and its place in a bucket. `box` is in logical
/// coordinates and lies inside the piece's own box; [first, first + bytes) counts the box's bytes,
/// not the piece's.
struct BucketRange {
  std::uint32_t piece = 0;
  std::uint32_t bucket = 0;
  Box box;
  std::uint64_t first = 0;
  std::uint64_t bytes = 0;
  std::uint64_t bucket_offset = 0;
};

/// kPack and kUnpack.
struct BucketWork {
  std::vector<BucketRange> ranges;
};

struct BucketDone {
  Status status;
};

struct AttachBucket {
  std::uint32_t bucket = 0;
  std::uint64_t bytes = 0;
};

struct Claimed {
  Status status;  ///< kNotFound when the memory equals no kept version
  Version version;
};

struct Reply {
  Status status;
};

/// Body bytes of a message. A Status travels as code, reason, native and message; texts longer than
/// kMaxTextBytes are Shortened(). kClaim, kCancelUpdate, kGoodbye, kPing, kPong and kExplain have
/// an empty body and no struct.
template <typename Message>
std::vector<std::byte> Encode(const Message& message);

/// The message, or kInvalidArgument/kMalformed. Never trusts a count or a length.
///
/// Hello and Welcome begin with the protocol number. When it is not ours the rest of the body is
/// not looked at: only `protocol` is set, and a Welcome's status says that the two do not fit.
template <typename Message>
Result<Message> Decode(std::span<const std::byte> body);

}  // namespace tensorbus::wire
