#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mapping.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "worker_shim/bucket_service.h"
#include "worker_shim/framing.h"
#include "worker_shim/wire.h"

namespace tensorbus::worker_shim {

/// A request to the agent that has been sent; 0 is none.
using RequestId = Id<struct RequestTag>;

enum class HookKind { kFence, kFlipBegin, kLive };

/// Runs in the thread that waits or polls, or in the service thread, with no lock held. It may call
/// the client, but not wait. A failure refuses the step it was called for.
using Hook = std::function<Status(HookKind, const wire::HookEvent&)>;

struct ConnectOptions {
  RankIdentity identity;
  std::string agent_socket;        ///< "": DefaultAgentSocket()
  std::optional<uid_t> agent_uid;  ///< whose agent it may be; none: ours or root's
  std::string library;
  Nanos timeout = std::chrono::seconds(5);
};

/// A stretch of this process's memory that pieces may lie in. Borrowed: it must outlive the client.
struct Segment {
  std::byte* address = nullptr;
  std::uint64_t bytes = 0;
  int fd = -1;  ///< the shared memory that `address` maps from its first byte on; -1: private. A
                ///< duplicate is kept.
};

/// How a request ended. Which fields mean something depends on what was asked.
struct Outcome {
  Status status;
  Version version;
  SessionId session;
  std::uint64_t bytes = 0;
  double seconds = 0;
  double copy_seconds = 0;
  DigestSum digest;
  wire::Registered registered;  ///< of Register() only
};

/// One rank's conversation with its agent.
///
/// Nothing happens behind the caller's back: frames are read, hooks run and buckets packed only
/// while some thread is in Wait(), Poll() or a call that waits, or in the service thread after
/// StartService(). When the agent goes away every pending request fails with kPeerLost, and says
/// why if the agent broke this rank off; Reconnect() registers the same memory with the agent that
/// listens then.
///
/// A consumer whose memory may be a mixture is dirty: the agent said so, or went away between the
/// answer to a hook that let it write and the word that the version is live. Its update fails with
/// kDirty then, and every registration says so until a version is live or claimed.
///
/// A handle belongs to the process that made it: after fork() every call in the child fails.
///
/// Threads: thread-safe. Of several waiting threads one reads for all.
class Client {
 public:
  /// Most requests that may be unanswered or not waited for.
  static constexpr std::size_t kRequestsMax = 1024;
  static constexpr Nanos kAskingWait = std::chrono::milliseconds(200);

  /// Makes the control page, connects and says hello.
  ///
  /// Errors: as ConnectToAgent(); kFailedPrecondition/kProtocolVersion; whatever the agent refuses
  /// the identity with.
  static Result<std::unique_ptr<Client>> Connect(ConnectOptions options);

  /// Says goodbye, does not wait for anything.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void SetHook(Hook hook);

  /// Adds memory; sent with the next Register(). Returns its number, counted from 0.
  Result<std::uint32_t> Attach(const Segment& segment);
  /// Forgets all segments, before others are attached for a new layout. Until that is registered
  /// Reconnect() goes on with those of the old one.
  void DetachAll();

  /// Tells the agent what lies where and waits for its answer. `segment_bytes` is filled in here.
  ///
  /// Errors: kInvalidArgument from Validate(); kFailedPrecondition/kBusy while a request has no
  /// answer, and nothing changes; whatever agent and daemon refuse, or kDeadlineExceeded. When one
  /// that was to replace another fails after the agent heard of it, the connection is lost: a
  /// session could still move what lay where the old one said.
  Result<wire::Registered> Register(wire::Register message, Nanos timeout);

  /// The same identity, memory and registration with the agent that listens now, and the version
  /// that was published last, unless it was released or the memory was written since. Snapshots
  /// were the old agent's and are gone. While nobody listens, for example because the agent is
  /// being restarted, it waits for one; memory may be written meanwhile.
  ///
  /// `stop`, if any, is asked now and then during that wait, in this thread and with no lock held;
  /// when it says true the call fails with kCancelled.
  ///
  /// Errors: kUnavailable/kNotRunning when none came in time; as Connect() and Register().
  Result<wire::Registered> Reconnect(Nanos timeout, const std::function<bool()>& stop = {});

  Result<RequestId> Publish(const wire::Publish& message);
  Result<RequestId> RequestRelease(Version version, Nanos timeout);
  Result<RequestId> Update(const wire::Update& message);
  Result<RequestId> CancelUpdate();
  Result<RequestId> Claim();

  /// Waits until the request has ended; then forgets it and returns how. On kDeadlineExceeded the
  /// request goes on and may be waited for again; the message says what it waits for, which is
  /// asked shortly before the end (a wait of less than kAskingWait asks nothing by itself).
  Result<Outcome> Wait(RequestId request, Nanos timeout);
  /// Asks the agent what the request waits for; a Wait() that ends before it says so. For callers
  /// that wait in slices. Returns at once.
  void Explain(RequestId request);
  /// Whether Wait() would return at once. Does not read the socket.
  bool Done(RequestId request);
  /// Nobody will ask for its outcome.
  void Forget(RequestId request);
  /// Handles everything that is there and returns. No-op while another thread waits.
  Status Poll();
  /// Readable whenever Poll() has something to do or a request has ended since the last Poll().
  /// Owned by the client.
  Result<int> PollFd();

  /// To be called before the first write after a publish: waits until the published version's
  /// memory was released, then bumps the write counter. Returns how long it waited.
  ///
  /// Errors: kDeadlineExceeded with the version and how it is held; nothing was bumped then. With
  /// the agent gone nobody reads the memory any more: OK.
  Result<Nanos> BeforeWrite(Nanos timeout);

  /// Answers the agent from a thread of its own ("tb-service"), so that hooks and buckets do not
  /// depend on somebody waiting. Idempotent.
  Status StartService();
  void StopService();

  /// OK while the agent is there, else why not.
  Status connection();
  const std::string& agent_socket() const { return options_.agent_socket; }
  std::string agent_name();
  Version released_version() const;
  /// What this rank's memory is, whole; 0 when it is nothing yet or dirty.
  Version live_version() const;
  std::uint64_t write_count() const;

 private:
  struct Pending {
    wire::MessageType answer = wire::MessageType::kReply;
    std::optional<Outcome> outcome;
    Status waits_for;  ///< what the agent said of it; OK before that
  };
  /// What the agent was allowed to do with the served memory.
  enum class Writing {
    kNone,
    kAllowed,  ///< every byte goes through us, and none has
    kBegun,    ///< bytes may have been written
  };
  struct OwnedSegment {
    std::byte* address = nullptr;
    std::uint64_t bytes = 0;
    std::shared_ptr<const UniqueFd> fd;  ///< null: private memory
  };

  Client(ConnectOptions options, UniqueFd page_fd, Mapping page);

  Status Open(TimePoint deadline);
  Status CheckProcess() const;
  /// `returns`: to another agent, with what was published through the one before.
  Result<wire::Registered> SendRegistration(wire::Register message,
                                            std::vector<OwnedSegment> segments, TimePoint deadline,
                                            bool returns);
  /// Descriptors to pass on, and pages touched: all that may fail before the agent hears anything.
  Result<std::vector<UniqueFd>> PrepareSegments(const std::vector<OwnedSegment>& segments) const;
  /// Sends the segments and the registration; the latter's request is the last.
  Result<std::vector<RequestId>> Announce(std::vector<UniqueFd> fds) TB_REQUIRES(mutex_);
  /// The last one's outcome, or the first failure.
  Result<Outcome> AwaitAll(const std::vector<RequestId>& requests, TimePoint deadline);
  Result<wire::Registered> ComeBack(TimePoint deadline, const std::function<bool()>& stop);
  /// Open(), again and again while there is no agent.
  Status OpenOnceThere(TimePoint deadline, const std::function<bool()>& stop);
  Result<Outcome> WaitUntil(RequestId request, TimePoint deadline);
  void AskExplanation(std::uint64_t request, Pending& pending) TB_REQUIRES(mutex_);

  Result<RequestId> Ask(wire::MessageType type, wire::MessageType answer,
                        std::vector<std::byte> body, std::vector<UniqueFd> fds = {})
      TB_REQUIRES(mutex_);
  Status SendFrame(wire::MessageType type, std::uint64_t request, std::vector<std::byte> body,
                   std::vector<UniqueFd> fds = {}) TB_REQUIRES(mutex_);
  /// Reads and handles what is there; when nothing is, waits for the socket first. The caller is
  /// the only reader meanwhile. `deadline` in the past never waits.
  void Pump(TimePoint deadline) TB_REQUIRES(mutex_);
  bool ReadFrames() TB_REQUIRES(mutex_);
  void HandleFrame(wire::Frame frame) TB_REQUIRES(mutex_);
  Status HandleAnswer(const wire::Frame& frame) TB_REQUIRES(mutex_);
  Status HandleExplained(const wire::Frame& frame) TB_REQUIRES(mutex_);
  Status HandleHook(HookKind kind, const wire::Frame& frame) TB_REQUIRES(mutex_);
  Status HandleBucketWork(const wire::Frame& frame) TB_REQUIRES(mutex_);
  Status HandleAttachBucket(wire::Frame frame) TB_REQUIRES(mutex_);
  /// What a kBrokenOff makes of this connection.
  Status BrokenOff(const wire::Frame& frame) const;
  /// Why the agent broke us off, if it said so before it closed; else `closed`.
  Status LastWord(Status closed) TB_REQUIRES(mutex_);
  Status AwaitUnread(TimePoint deadline) TB_REQUIRES(mutex_);
  /// What the next agent is told of the one before.
  wire::Return MakeReturn() const TB_REQUIRES(mutex_);
  void Lose(Status why) TB_REQUIRES(mutex_);
  void NotePublished(const Outcome& outcome, std::uint64_t request) TB_REQUIRES(mutex_);
  void NoteUpdated(const Outcome& outcome, std::uint64_t request) TB_REQUIRES(mutex_);
  void NoteWhole() TB_REQUIRES(mutex_);
  void NoteUnended() TB_REQUIRES(mutex_);
  void WatchSocket(bool watch) TB_REQUIRES(mutex_);
  void Signal(const UniqueFd& event) const;
  void RunService();

  const wire::ControlPage& page() const;
  wire::ControlPage& page();

  ConnectOptions options_;
  UniqueFd page_fd_;
  Mapping page_;
  pid_t process_;
  UniqueFd wake_;   ///< eventfd: interrupts the reading thread's poll
  UniqueFd ended_;  ///< eventfd: a request ended, perhaps while another thread read

  Mutex mutex_;
  CondVar changed_;  ///< a request ended, the reader's place is free, or the service should stop
  std::string agent_name_ TB_GUARDED_BY(mutex_);
  UniqueFd socket_ TB_GUARDED_BY(mutex_);
  pid_t agent_pid_ TB_GUARDED_BY(mutex_) = 0;
  Status lost_ TB_GUARDED_BY(mutex_);
  wire::FrameReader reader_ TB_GUARDED_BY(mutex_);
  wire::FrameWriter writer_ TB_GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, Pending> pending_ TB_GUARDED_BY(mutex_);
  std::uint64_t next_request_ TB_GUARDED_BY(mutex_) = 1;
  bool reading_ TB_GUARDED_BY(mutex_) = false;
  std::thread::id reading_thread_ TB_GUARDED_BY(mutex_);
  Hook hook_ TB_GUARDED_BY(mutex_);
  UniqueFd epoll_ TB_GUARDED_BY(mutex_);  ///< PollFd(): the socket and `ended_`
  bool service_stop_ TB_GUARDED_BY(mutex_) = false;

  MemoryMode mode_ TB_GUARDED_BY(mutex_) = MemoryMode::kMapped;
  Writing writing_ TB_GUARDED_BY(mutex_) = Writing::kNone;
  /// Updates that were not answered, oldest first: the agent is at that one and refuses the others.
  std::vector<std::uint64_t> updates_ TB_GUARDED_BY(mutex_);
  /// Changed under `mutex_`; live_version() looks without it, since a registration may hold it
  /// long.
  std::atomic<bool> dirty_{false};

  std::vector<OwnedSegment> segments_ TB_GUARDED_BY(mutex_);  ///< for the next registration
  std::optional<wire::Register> registration_ TB_GUARDED_BY(mutex_);
  std::vector<OwnedSegment> registered_segments_ TB_GUARDED_BY(mutex_);  ///< `registration_`'s
  ChannelEpoch epoch_ TB_GUARDED_BY(mutex_);  ///< of the last registration
  /// The agent accepted a registration on this connection, or may have.
  bool agent_knows_ TB_GUARDED_BY(mutex_) = false;
  /// A publish, and the write counter at that time.
  struct Offer {
    wire::Publish message;
    std::uint64_t write_count = 0;
  };
  std::map<std::uint64_t, Offer> publishing_ TB_GUARDED_BY(mutex_);  ///< by request, unanswered
  Version unanswered_ TB_GUARDED_BY(mutex_);  ///< published when the agent went away
  Offer accepted_ TB_GUARDED_BY(mutex_);      ///< the newest that was; version 0: none
  /// What was accepted last, while its memory was not written since.
  Version held_ TB_GUARDED_BY(mutex_);
  bool coming_back_ TB_GUARDED_BY(mutex_) = false;  ///< a thread is in Reconnect()
  /// It is connecting, and an agent may be told what the memory holds.
  bool reconnecting_ TB_GUARDED_BY(mutex_) = false;

  BucketService buckets_;
  std::thread service_;
};

}  // namespace tensorbus::worker_shim
