#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/ids.h"
#include "tensorbus/types/piece.h"
#include "tensorbus/types/strided.h"

// The public C++ interface: publish a model's tensors, or receive them, from a rank of a job. Over
// the C interface of worker_shim, so that nothing here depends on how that is built.
namespace tensorbus::client {

/// Shared memory that the agent maps, for the tensors of one rank. Cheap to copy; the memory lives
/// as long as the last copy (a Client keeps one of each arena attached to it). Thread-safe.
class Arena {
 public:
  /// Zeroed memory, aligned to 2 MiB from 64 MiB on. Errors: kResourceExhausted.
  static Result<Arena> Create(std::uint64_t bytes);

  /// `bytes` that nobody has yet, aligned to a power of two up to 2 MiB. Never given back.
  Result<std::span<std::byte>> Allocate(std::uint64_t bytes, std::uint64_t alignment = 64);

  std::span<std::byte> memory() const;
  std::uint64_t used() const;
  /// Borrowed.
  int fd() const;

 private:
  friend class Client;
  struct Impl;
  explicit Arena(std::shared_ptr<Impl> impl);

  std::shared_ptr<Impl> impl_;
};

struct ConnectOptions {
  RankIdentity identity = {};
  std::string agent_socket = {};  ///< "": $TENSORBUS_AGENT_SOCKET, else the user's runtime folder
  std::optional<uid_t> agent_uid = {};  ///< whose agent it may be; none: this user's or root's
  std::string library = {};             ///< for people: "myengine 1.2"
  Nanos timeout = std::chrono::seconds(5);
};

struct RegisterOptions {
  std::vector<TensorSpec> tensors;
  std::vector<Piece> pieces;
  FlipMode flip = FlipMode::kInPlace;      ///< consumer
  Proof proof = Proof::kReadback;          ///< consumer
  std::vector<std::string> leave_out;      ///< consumer: what it deliberately does not take
  std::optional<MemoryMode> private_mode;  ///< for private segments; none: the best that works
  Nanos timeout = std::chrono::seconds(60);
};

/// How the agent reaches this rank's memory, and why so.
struct Registered {
  MemoryMode mode = MemoryMode::kMapped;
  std::string why;
  double expected_gb_per_s = 0;
  ChannelEpoch epoch;
  /// The newest version of the channel, 0 for none; of a job that began anew the newest before it
  /// did, the same for all its ranks. The next to publish is above it.
  Version latest_version;
  double register_seconds = 0;
  double prefault_seconds = 0;
};

/// What a slow consumer may cost the producer.
enum class SlowConsumer : std::uint8_t {
  kWait = 1,      ///< memory is held until `min_replicas` and all present replicas have the version
  kSkip = 2,      ///< memory comes back as soon as running sessions end
  kSnapshot = 3,  ///< the agent copies at publish; memory comes back at once
};

struct PublishOptions {
  Version version = {};
  SlowConsumer policy = SlowConsumer::kWait;
  std::uint32_t min_replicas = 1;
  bool receipts =
      false;  ///< digest the memory at publish, to catch writes that bypass BeforeWrite()
  std::uint32_t keep_last = 0;  ///< with kSnapshot: how many stay for a rollback
};

enum class Selector : std::uint8_t { kLatest = 1, kNext = 2, kPinned = 3 };

struct UpdateOptions {
  Selector selector = Selector::kLatest;
  Version version = {};  ///< with kPinned
  Nanos timeout = std::chrono::seconds(600);
};

/// How a request ended well. Which fields mean something depends on what was asked.
struct Outcome {
  Version version;
  SessionId session;
  std::uint64_t bytes = 0;  ///< of an update: what arrived at this rank
  double seconds = 0;       ///< from the session's start to the flip
  double copy_seconds = 0;  ///< first byte read to last byte checked
  DigestSum digest;         ///< of all that arrived
};

/// When a hook runs. A consumer in place hears kFence and kLive, with a shadow kFlipBegin and
/// kLive.
enum class HookKind : std::uint8_t {
  kFence = 0,      ///< stop using the weights until kLive
  kFlipBegin = 1,  ///< stop at a step edge; the swap follows
  kLive = 2,       ///< the version is in memory: drop caches, go on
};

struct HookEvent {
  HookKind kind = HookKind::kFence;
  SessionId session;
  Version version;
  Nanos timeout = {};
};

/// A failure refuses the step. Must not wait on the same client, nor throw.
using Hook = std::function<Status(const HookEvent&)>;

/// A request on its way. Movable; dropping it gives up the outcome, not the request. Must not
/// outlive its Client. Thread-compatible.
class Request {
 public:
  Request(Request&& other) noexcept;
  Request& operator=(Request&& other) noexcept;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;
  ~Request();

  /// How it ended; to be called again after kDeadlineExceeded with done() false, otherwise once.
  /// That error says what the request waits for; a wait of less than 200 ms does not ask by itself.
  Result<Outcome> Wait(Nanos timeout);
  /// For callers that wait in slices: asks what it waits for. Returns at once.
  void Explain();
  /// Whether Wait() has given its outcome; done() is true then too.
  bool taken() const { return client_ == nullptr; }
  /// Whether Wait() would return at once. Reads nothing: see Client::Poll().
  bool done() const;
  /// Its number, for the log.
  std::uint64_t id() const { return id_; }

 private:
  friend class Client;
  Request(void* client, std::uint64_t id) : client_(client), id_(id) {}

  void* client_ = nullptr;
  std::uint64_t id_ = 0;
};

/// One rank's connection to the agent of its host.
///
/// Hooks run and buckets are packed only while a thread is in a call that waits, in Poll(), or in
/// the thread of StartService(). Movable. Thread-safe. Not to be used after fork().
class Client {
 public:
  /// Errors: kUnavailable/kNotRunning (start one with `tensorbusctl up`); kPermissionDenied;
  /// kFailedPrecondition/kProtocolVersion; what the agent refuses the rank with.
  static Result<Client> Connect(const ConnectOptions& options);
  Client(Client&& other) noexcept;
  Client& operator=(Client&& other) noexcept;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client();

  void SetHook(Hook hook);

  /// Memory for pieces to lie in; numbered from 0. Sent with the next Register().
  Result<std::uint32_t> Attach(const Arena& arena);
  /// Shared memory of somebody else: `memory` maps `fd` from its first byte on.
  Result<std::uint32_t> AttachShared(std::span<std::byte> memory, int fd);
  /// Private memory, reached through the kernel or through buckets. Must outlive the client.
  Result<std::uint32_t> AttachPrivate(std::span<std::byte> memory);
  Status DetachAll();

  /// When one that was to replace another fails after the agent heard of it, the connection is
  /// lost.
  Result<Registered> Register(const RegisterOptions& options);
  /// After the agent went away: the same with the one that listens now. While nobody listens it
  /// waits for one (kUnavailable/kNotRunning when none came); the memory may be written meanwhile.
  /// A producer offers what it published last anew, unless it was released or written since;
  /// snapshots went with the agent. After a failure the connection is lost, and it may be tried
  /// again. `stop`, if any, is asked now and then during that wait, in this thread; true ends it
  /// with kCancelled.
  Status Reconnect(Nanos timeout, const std::function<bool()>& stop = {});

  // ---- producer

  /// The memory must not change from here until BeforeWrite() has returned.
  Result<Request> Publish(const PublishOptions& options);
  Result<Request> RequestRelease(Version version, Nanos timeout);
  /// Before the first write after a publish: waits until the memory is free. Returns how long.
  ///
  /// Errors: kDeadlineExceeded; the memory must still not be written then.
  Result<Nanos> BeforeWrite(Nanos timeout);
  Version released_version() const;

  // ---- consumer

  /// An agent that goes away while it may be writing the memory leaves it dirty: the request fails
  /// with kDirty, Reconnect() registers it as that, and the next update repairs it.
  Result<Request> Update(const UpdateOptions& options);
  Result<Request> CancelUpdate();
  /// Which version this rank's memory holds, proven by digest. kNotFound when none that is kept.
  Result<Request> Claim();
  /// What this rank's memory is, whole; 0 when it is nothing yet or dirty.
  Version live_version() const;

  // ---- event loops and threads

  /// Handles what is there and returns. Errors: kUnavailable/kPeerLost once the agent is gone.
  Status Poll();
  /// Readable when Poll() has something to do or a request has ended. Borrowed.
  Result<int> PollFd();
  Status StartService();
  Status StopService();

  /// OK while the agent is there.
  Status connection() const;
  std::string agent_name() const;

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorbus::client
