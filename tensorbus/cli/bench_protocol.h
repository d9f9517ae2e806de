#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"

// How the process that runs a benchmark speaks with those it starts: messages over a SOCK_SEQPACKET
// pair, one reply to each command. A command has one size; a reply is its numbers and as much text
// as it has. Both ends are of one build; bench/ and the scripts of bench/peers speak it too.
namespace tensorbus::cli {

enum class BenchCommand : std::uint32_t {
  kHello = 1,    ///< reply once set up: memory touched, connected, registered
  kWrite = 2,    ///< source: rewrite every tensor with `version`
  kPublish = 3,  ///< our source: publish `version`, wait until its memory is free again
  kAsk = 4,      ///< our target: ask for the version after the live one
  kWait = 5,     ///< our target: reply once it is live
  kRun = 6,      ///< a peer: stand ready, move `version` at the go flag, reply when done
  kVerify = 7,   ///< target: compare every element with `version`
  kQuit = 8,     ///< end with status 0; no reply
  kPeer = 9,     ///< hand-cma's target: source rank `count` is process `b`, its arena at `a`
  kFault = 10,   ///< ours: do at once what BenchFault `a` says, as nobody should
};

struct BenchMessage {
  BenchCommand command = BenchCommand::kHello;
  /// kRun: the value of the go flag to wait for; kPeer: a rank; kPublish: 1 to reply on acceptance
  std::uint32_t count = 0;
  std::uint64_t version = 0;
  std::uint64_t a = 0;  ///< kPeer: an address; kRun of a ceiling: a BenchCeiling; kFault
  std::uint64_t b = 0;  ///< kPeer: a process id
};
static_assert(sizeof(BenchMessage) == 32);

/// What a reply begins with on its way.
struct BenchReplyHead {
  std::uint32_t code = 0;  ///< a Code; then the text says what went wrong
  BenchCommand command = BenchCommand::kHello;
  std::uint64_t begin_ns = 0;    ///< CLOCK_MONOTONIC: the publish call; a peer's first byte
  std::uint64_t end_ns = 0;      ///< the flip as the worker sees it; a peer's last byte
  std::uint64_t cpu_ns = 0;      ///< processor time of this process meanwhile
  std::uint64_t bytes = 0;       ///< that arrived
  std::uint64_t address = 0;     ///< hand-cma's source: its arena
  double values[4] = {};         ///< see where they are filled
  std::uint32_t reason = 0;      ///< a Reason, of the failure
  std::uint32_t text_bytes = 0;  ///< that follow; set by SendBench()
};
static_assert(sizeof(BenchReplyHead) == 88);

struct BenchReply : BenchReplyHead {
  std::string text;  ///< an error, or why a memory mode was chosen
};

/// More than a worker can hear from its agent: nothing of an error's trace or remedy is lost here.
inline constexpr std::size_t kMaxBenchTextBytes = 32768;

/// Which ceiling a kRun measures.
enum class BenchCeiling : std::uint64_t {
  kMemcpy = 0,   ///< two threads, memcpy a MiB at a time
  kStream = 1,   ///< two threads, stores past the cache
  kSocket1 = 2,  ///< one TCP stream over loopback
  kSocket2 = 3,  ///< two of them
};

/// What a rank does on kFault.
enum class BenchFault : std::uint64_t {
  kWriteByte = 0,  ///< changes the first byte of its first tensor, without asking anybody
  kDie = 1,        ///< ends itself with SIGKILL
};

/// kHello of a worker: values of BenchReply.
inline constexpr int kRegisterSeconds = 0;
inline constexpr int kPrefaultSeconds = 1;
/// kPublish: until the agent accepted it, receipts included; until the memory was free.
inline constexpr int kAcceptSeconds = 0;
inline constexpr int kBlockedSeconds = 1;
/// kWait: from the session's start to the flip; first byte read to last byte checked.
inline constexpr int kSessionSeconds = 0;
inline constexpr int kCopySeconds = 1;

/// Shared by the processes of one peer. Each says in its own slot when it stands ready.
struct BenchGo {
  static constexpr std::size_t kSlots = 255;
  /// Pairs with the loads in AwaitGo(): grows by one for every run.
  std::atomic<std::uint32_t> go{0};
  std::uint32_t unused[15] = {};
  struct alignas(64) Slot {
    std::atomic<std::uint32_t> ready{0};  ///< the value of `go` this process waits for
  };
  Slot slots[kSlots];
};
static_assert(sizeof(BenchGo) == 64 * 256);

/// Errors: kUnavailable/kPeerLost when the other end is gone; kDeadlineExceeded.
Status SendBench(int fd, const BenchMessage& message);
/// With at most kMaxBenchTextBytes of its text, Shortened().
Status SendBench(int fd, const BenchReply& reply);
/// Waits without a deadline: the end of the stream is what ends a worker whose bench has died.
Result<BenchMessage> ReceiveCommand(int fd);
/// What is there now; kDeadlineExceeded when nothing is.
Result<BenchReply> ReceiveReply(int fd);

/// A reply that carries a failure, or (for OK) nothing yet.
BenchReply ReplyTo(BenchCommand command, const Status& status);
Status StatusOf(const BenchReply& reply);

/// CLOCK_MONOTONIC, the same for all processes of a host.
inline std::uint64_t MonotonicNs() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

/// Processor time of this process.
inline std::uint64_t ProcessCpuNs() {
  timespec now = {};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace tensorbus::cli
