#include "bench/ceilings.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <fmt/format.h>
#include <functional>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <sys/time.h>
#include <thread>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/cli/bench_pattern.h"
#include "tensorbus/kernels/copy.h"

namespace tensorbus::bench {
namespace {

constexpr std::uint64_t kChunkBytes = 1 << 20;
constexpr std::uint32_t kThreads = 2;

/// A stretch of both arenas that one call copies.
struct Chunk {
  const std::byte* from;
  std::byte* to;
  std::uint64_t bytes;
};

/// Calls `work` for [begin, end) of the target, a chunk at a time; stops when it returns false.
template <typename Work>
void ForEachChunk(const Mapping& source, const Mapping& target, std::uint64_t begin,
                  std::uint64_t end, const Work& work) {
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t from = at % source.size();
    const std::uint64_t bytes = std::min({kChunkBytes, end - at, source.size() - from});
    if (!work(Chunk{source.data() + from, target.data() + at, bytes})) return;
    at += bytes;
  }
}

void CopyChunk(const Chunk& chunk, bool stream) {
  if (!stream) {
    std::memcpy(chunk.to, chunk.from, chunk.bytes);
    return;
  }
  StridedBlock block;
  block.rank = 1;
  block.extents[0] = chunk.bytes;
  block.strides[0] = 1;
  block.stream_strides[0] = 1;
  StridedBlock from = block;
  from.base = const_cast<std::byte*>(chunk.from);  // only read
  block.base = chunk.to;
  kernels::CopyRange(from, block, {0, chunk.bytes}, kernels::StoreKind::kStream);
}

/// For every thread to come to the start; the machine may be busy, but not that busy.
constexpr Nanos kStartPatience = std::chrono::seconds(30);

/// Threads that start together at a go flag; knows when they started and when the last one ended.
class StartLine {
 public:
  /// `who` names the thread should it not come to the start.
  void Add(std::string who, std::function<void()> work) {
    runners_.emplace_back(std::move(who), std::move(work));
  }

  /// Once. Error: kDeadlineExceeded naming who did not come; then nobody has started.
  Status Run(cli::BenchReply* reply) {
    std::vector<std::jthread> threads;
    threads.reserve(runners_.size());
    for (Runner& runner : runners_) threads.emplace_back([this, &runner] { Start(runner); });
    const Status came = AwaitReady();
    reply->begin_ns = cli::MonotonicNs();
    signal_.store(came.ok() ? Signal::kGo : Signal::kLeave, std::memory_order_release);
    for (std::jthread& thread : threads) thread.join();
    reply->end_ns = end_ns_.load();
    return came;
  }

 private:
  enum class Signal { kWait, kGo, kLeave };
  struct Runner {
    Runner(std::string name, std::function<void()> run)
        : who(std::move(name)), work(std::move(run)) {}
    std::string who;
    std::function<void()> work;
    std::atomic<bool> ready{false};  // pairs with AwaitReady()
  };

  void Start(Runner& runner) {
    runner.ready.store(true, std::memory_order_release);
    Signal signal = Signal::kWait;
    // Run() gives one or the other within its patience.
    while ((signal = signal_.load(std::memory_order_acquire)) == Signal::kWait) {
      std::this_thread::yield();
    }
    if (signal == Signal::kLeave) return;
    runner.work();
    const std::uint64_t now = cli::MonotonicNs();
    std::uint64_t last = end_ns_.load();
    while (last < now && !end_ns_.compare_exchange_weak(last, now)) {
    }
  }

  Status AwaitReady() const {
    const TimePoint deadline = Clock::Real().Now() + kStartPatience;
    for (const Runner& runner : runners_) {
      while (!runner.ready.load(std::memory_order_acquire)) {
        if (Clock::Real().Now() >= deadline) {
          return {Code::kDeadlineExceeded,
                  fmt::format("{} did not come to the start within {:.0f} s", runner.who,
                              Seconds(kStartPatience)),
                  Reason::kBusy};
        }
        std::this_thread::yield();
      }
    }
    return {};
  }

  std::deque<Runner> runners_;                 // stay where they are
  std::atomic<Signal> signal_{Signal::kWait};  // pairs with the loads of the threads
  std::atomic<std::uint64_t> end_ns_{0};
};

constexpr time_t kSocketSeconds = 30;

/// A connected pair of TCP sockets over loopback.
struct SocketPair {
  UniqueFd sender;
  UniqueFd receiver;
};

Result<SocketPair> ConnectLoopback() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  SocketPair pair;
  // A peer that never comes, or never reads, ends the measurement instead of hanging it.
  const timeval patience = {kSocketSeconds, 0};
  const auto bound = [&patience](int fd) {
    return ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0 &&
           ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) == 0;
  };
  pair.sender = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!bound(listener.get()) || !bound(pair.sender.get()) ||
      ::bind(listener.get(), any, size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), any, &size) != 0 ||
      ::connect(pair.sender.get(), any, size) != 0) {
    return ErrnoStatus(errno, "loopback socket");
  }
  pair.receiver = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!pair.receiver.valid() || !bound(pair.receiver.get()))
    return ErrnoStatus(errno, "loopback socket");
  return pair;
}

bool SendAll(int fd, const std::byte* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, data, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    bytes -= static_cast<std::uint64_t>(sent);
  }
  return true;
}

bool ReceiveAll(int fd, std::byte* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t got = ::recv(fd, data, bytes, 0);
    if (got <= 0) return false;
    data += got;
    bytes -= static_cast<std::uint64_t>(got);
  }
  return true;
}

Result<Mapping> MakeArena(const char* name, std::uint64_t bytes) {
  TB_ASSIGN_OR_RETURN(const UniqueFd fd, CreateMemfd(name, bytes));
  TB_ASSIGN_OR_RETURN(Mapping mapping,
                      Mapping::Create(fd.get(), bytes, Mapping::Access::kReadWrite));
  TB_RETURN_IF_ERROR(TouchPages(mapping.span()));
  return mapping;
}

}  // namespace

Result<Ceilings> Ceilings::Create(std::uint64_t source_bytes, std::uint64_t target_bytes) {
  TB_ASSIGN_OR_RETURN(Mapping source, MakeArena("ceiling-source", source_bytes));
  TB_ASSIGN_OR_RETURN(Mapping target, MakeArena("ceiling-target", target_bytes));
  return Ceilings(std::move(source), std::move(target));
}

void Ceilings::Write(std::uint64_t version) {
  cli::FillRow(source_.data(), 0, source_.size() / 4, 4, cli::PatternKey(version, "ceiling"));
}

Status Ceilings::RunCopy(bool stream, cli::BenchReply* reply) {
  StartLine line;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    const std::uint64_t begin = target_.size() / kThreads * t;
    const std::uint64_t end =
        t + 1 == kThreads ? target_.size() : target_.size() / kThreads * (t + 1);
    line.Add(fmt::format("copy thread {} of {}", t, kThreads), [this, begin, end, stream] {
      ForEachChunk(source_, target_, begin, end, [stream](const Chunk& chunk) {
        CopyChunk(chunk, stream);
        return true;
      });
    });
  }
  return line.Run(reply);
}

Status Ceilings::RunSocket(std::uint32_t streams, cli::BenchReply* reply) {
  std::vector<SocketPair> pairs;
  for (std::uint32_t s = 0; s < streams; ++s) {
    TB_ASSIGN_OR_RETURN(SocketPair pair, ConnectLoopback());
    pairs.push_back(std::move(pair));
  }
  std::atomic<bool> broken{false};
  StartLine line;
  for (std::uint32_t s = 0; s < streams; ++s) {
    const std::uint64_t begin = target_.size() / streams * s;
    const std::uint64_t end =
        s + 1 == streams ? target_.size() : target_.size() / streams * (s + 1);
    const SocketPair* pair = &pairs[s];
    const std::string stream = fmt::format("stream {} of {}", s, streams);
    line.Add("the sender of " + stream, [this, begin, end, pair, &broken] {
      ForEachChunk(source_, target_, begin, end, [pair, &broken](const Chunk& chunk) {
        if (!SendAll(pair->sender.get(), chunk.from, chunk.bytes)) broken = true;
        return !broken.load();
      });
      ::shutdown(pair->sender.get(), SHUT_WR);
    });
    line.Add("the receiver of " + stream, [this, begin, end, pair, &broken] {
      ForEachChunk(source_, target_, begin, end, [pair, &broken](const Chunk& chunk) {
        if (!ReceiveAll(pair->receiver.get(), chunk.to, chunk.bytes)) broken = true;
        return !broken.load();
      });
    });
  }
  TB_RETURN_IF_ERROR(line.Run(reply));
  if (broken) return {Code::kUnavailable, "a loopback stream broke", Reason::kPeerLost};
  return {};
}

Status Ceilings::Run(cli::BenchCeiling which, cli::BenchReply* reply) {
  reply->bytes = target_.size();
  switch (which) {
    case cli::BenchCeiling::kMemcpy:
      return RunCopy(false, reply);
    case cli::BenchCeiling::kStream:
      return RunCopy(true, reply);
    case cli::BenchCeiling::kSocket1:
      return RunSocket(1, reply);
    case cli::BenchCeiling::kSocket2:
      return RunSocket(2, reply);
  }
  return {Code::kInvalidArgument, "no such ceiling"};
}

Status Ceilings::Verify() const {
  bool equal = true;
  ForEachChunk(source_, target_, 0, target_.size(), [&equal](const Chunk& chunk) {
    equal = std::memcmp(chunk.from, chunk.to, chunk.bytes) == 0;
    return equal;
  });
  if (!equal) return {Code::kDataLoss, "a ceiling copied wrongly", Reason::kChecksumMismatch};
  return {};
}

}  // namespace tensorbus::bench
