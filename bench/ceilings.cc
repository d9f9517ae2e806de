#include "bench/ceilings.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <thread>
#include <vector>

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

/// Threads that start together at a go flag; knows when they started and when the last one ended.
class StartLine {
 public:
  void Add(std::function<void()> work) {
    threads_.emplace_back([this, work = std::move(work)] {
      ready_.fetch_add(1);
      while (!go_.load(std::memory_order_acquire)) std::this_thread::yield();
      work();
      const std::uint64_t now = cli::MonotonicNs();
      std::uint64_t last = end_ns_.load();
      while (last < now && !end_ns_.compare_exchange_weak(last, now)) {
      }
    });
  }

  void Run(cli::BenchReply* reply) {
    while (ready_.load() != threads_.size()) std::this_thread::yield();
    reply->begin_ns = cli::MonotonicNs();
    go_.store(true, std::memory_order_release);
    for (std::jthread& thread : threads_) thread.join();
    reply->end_ns = end_ns_.load();
  }

 private:
  std::atomic<std::size_t> ready_{0};
  std::atomic<bool> go_{false};  // pairs with the loads of the threads
  std::atomic<std::uint64_t> end_ns_{0};
  std::vector<std::jthread> threads_;
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

void Ceilings::RunCopy(bool stream, cli::BenchReply* reply) {
  StartLine line;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    const std::uint64_t begin = target_.size() / kThreads * t;
    const std::uint64_t end =
        t + 1 == kThreads ? target_.size() : target_.size() / kThreads * (t + 1);
    line.Add([this, begin, end, stream] {
      ForEachChunk(source_, target_, begin, end, [stream](const Chunk& chunk) {
        CopyChunk(chunk, stream);
        return true;
      });
    });
  }
  line.Run(reply);
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
    line.Add([this, begin, end, pair, &broken] {
      ForEachChunk(source_, target_, begin, end, [pair, &broken](const Chunk& chunk) {
        if (!SendAll(pair->sender.get(), chunk.from, chunk.bytes)) broken = true;
        return !broken.load();
      });
      ::shutdown(pair->sender.get(), SHUT_WR);
    });
    line.Add([this, begin, end, pair, &broken] {
      ForEachChunk(source_, target_, begin, end, [pair, &broken](const Chunk& chunk) {
        if (!ReceiveAll(pair->receiver.get(), chunk.to, chunk.bytes)) broken = true;
        return !broken.load();
      });
    });
  }
  line.Run(reply);
  if (broken) return {Code::kUnavailable, "a loopback stream broke", Reason::kPeerLost};
  return {};
}

Status Ceilings::Run(cli::BenchCeiling which, cli::BenchReply* reply) {
  reply->bytes = target_.size();
  switch (which) {
    case cli::BenchCeiling::kMemcpy:
      RunCopy(false, reply);
      return {};
    case cli::BenchCeiling::kStream:
      RunCopy(true, reply);
      return {};
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
