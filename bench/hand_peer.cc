#include "bench/hand_peer.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "tensorbus/formats/file.h"

namespace tensorbus::bench {
namespace {

/// Entries of one process_vm_readv call.
constexpr std::size_t kVectors = 512;
/// Turns of the wait for the go flag before the core is offered to others.
constexpr int kSpins = 4096;
/// Whoever measures ends its peers long before.
constexpr std::uint64_t kGoTimeoutNs = 120'000'000'000;

Result<JobLayout> ReadLayout(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, formats::ReadText(path));
  return ParseJobLayout(std::as_bytes(std::span(text)));
}

Result<std::span<std::byte>> PrivateMemory(std::uint64_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return ErrnoStatus(errno, "private memory");
  const std::span<std::byte> memory(static_cast<std::byte*>(at), bytes);
  TB_RETURN_IF_ERROR(TouchPages(memory));
  return memory;
}

Result<Mapping> MapTouched(int fd, std::uint64_t bytes) {
  TB_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Create(fd, bytes, Mapping::Access::kReadWrite));
  TB_RETURN_IF_ERROR(TouchPages(mapping.span()));
  return mapping;
}

/// False when the flag never came.
bool AwaitGo(const std::atomic<std::uint32_t>& flag, std::uint32_t go) {
  const std::uint64_t deadline_ns = cli::MonotonicNs() + kGoTimeoutNs;
  for (int spins = 0; flag.load(std::memory_order_acquire) != go; ++spins) {
    if (spins < kSpins) {
      __builtin_ia32_pause();
    } else {
      if (cli::MonotonicNs() >= deadline_ns) return false;
      ::sched_yield();
    }
  }
  return true;
}

}  // namespace

Result<HandSource> HandSource::Create(const HandOptions& options) {
  HandSource source;
  TB_ASSIGN_OR_RETURN(source.layout_, ReadLayout(options.source));
  source.arena_ = cli::PlaceRank(source.layout_, options.rank);
  if (options.cma) {
    TB_ASSIGN_OR_RETURN(source.memory_, PrivateMemory(source.arena_.bytes));
  } else {
    if (options.rank >= options.arenas.size()) {
      return Status(Code::kInvalidArgument, "no arena for this rank");
    }
    TB_ASSIGN_OR_RETURN(source.mapping_,
                        MapTouched(options.arenas[options.rank], source.arena_.bytes));
    source.memory_ = source.mapping_.span();
  }
  return source;
}

void HandSource::Write(std::uint64_t version) {
  cli::FillArena(layout_, arena_, version, memory_.data());
}

Result<HandTarget> HandTarget::Create(const HandOptions& options) {
  HandTarget target;
  target.cma_ = options.cma;
  target.slot_ = options.slot;
  TB_ASSIGN_OR_RETURN(const JobLayout source, ReadLayout(options.source));
  TB_ASSIGN_OR_RETURN(target.layout_, ReadLayout(options.target));
  target.arena_ = cli::PlaceRank(target.layout_, options.rank);
  TB_ASSIGN_OR_RETURN(target.runs_, RunsOf(source, target.layout_, options.rank));
  for (const Run& run : target.runs_) target.bytes_ += run.bytes;
  TB_ASSIGN_OR_RETURN(
      target.go_, Mapping::Create(options.go, sizeof(cli::BenchGo), Mapping::Access::kReadWrite));
  if (options.slot >= cli::BenchGo::kSlots) {
    return Status(Code::kInvalidArgument, "more processes than the go page has slots");
  }
  target.peers_.resize(source.rank_count);
  if (!options.cma) {
    if (options.arenas.size() != source.rank_count) {
      return Status(Code::kInvalidArgument, "one arena for each source rank is needed");
    }
    for (std::uint32_t r = 0; r < source.rank_count; ++r) {
      TB_ASSIGN_OR_RETURN(Mapping mapping,
                          MapTouched(options.arenas[r], cli::PlaceRank(source, r).bytes));
      target.peers_[r].mapped = mapping.data();
      target.sources_.push_back(std::move(mapping));
    }
    TB_ASSIGN_OR_RETURN(const UniqueFd fd, CreateMemfd("hand-target", target.arena_.bytes));
    TB_ASSIGN_OR_RETURN(target.mapping_, MapTouched(fd.get(), target.arena_.bytes));
    target.memory_ = target.mapping_.span();
  } else {
    TB_ASSIGN_OR_RETURN(target.memory_, PrivateMemory(target.arena_.bytes));
  }
  return target;
}

Status HandTarget::SetPeer(std::uint32_t rank, std::uint64_t address, pid_t pid) {
  if (rank >= peers_.size()) return {Code::kInvalidArgument, "no such source rank"};
  peers_[rank].address = address;
  peers_[rank].pid = pid;
  return {};
}

void HandTarget::CopyShared() const {
  for (const Run& run : runs_) {
    std::memcpy(memory_.data() + run.target_offset, peers_[run.source].mapped + run.source_offset,
                run.bytes);
  }
}

Status HandTarget::CopyForeign() const {
  std::array<iovec, kVectors> local;
  std::array<iovec, kVectors> remote;
  for (std::size_t first = 0; first < runs_.size();) {
    const Peer& peer = peers_[runs_[first].source];
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    for (; count < kVectors && first + count < runs_.size(); ++count) {
      const Run& run = runs_[first + count];
      if (run.source != runs_[first].source) break;
      local[count] = {memory_.data() + run.target_offset, run.bytes};
      remote[count] = {reinterpret_cast<void*>(peer.address + run.source_offset), run.bytes};
      bytes += run.bytes;
    }
    const ssize_t got = ::process_vm_readv(peer.pid, local.data(), count, remote.data(), count, 0);
    if (got < 0) return ErrnoStatus(errno, "process_vm_readv");
    if (static_cast<std::uint64_t>(got) != bytes) {
      return {Code::kDataLoss, fmt::format("process_vm_readv read {} of {} bytes", got, bytes)};
    }
    first += count;
  }
  return {};
}

Status HandTarget::Move(std::uint32_t go, cli::BenchReply* reply) {
  auto* page = reinterpret_cast<cli::BenchGo*>(go_.data());
  page->slots[slot_].ready.store(go, std::memory_order_release);
  if (!AwaitGo(page->go, go)) {
    return {Code::kDeadlineExceeded, "nobody said go", Reason::kMissingRank};
  }
  reply->begin_ns = cli::MonotonicNs();
  Status copied;
  if (cma_) {
    copied = CopyForeign();
  } else {
    CopyShared();
  }
  reply->end_ns = cli::MonotonicNs();
  reply->bytes = bytes_;
  return copied;
}

Status HandTarget::Verify(std::uint64_t version) const {
  return cli::CheckArena(layout_, arena_, version, memory_.data());
}

}  // namespace tensorbus::bench
