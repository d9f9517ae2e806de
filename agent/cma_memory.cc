#include "agent/cma_memory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <sys/uio.h>

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/walk.h"

namespace tensorbus::agent {
namespace {

/// Most remote runs of one call; the kernel's own bound.
constexpr std::size_t kRunsPerCall = 1024;
static_assert(kRunsPerCall <= IOV_MAX);
/// An address that no process has: the kernel checks permission first and the address second.
constexpr std::uint64_t kNowhere = ~std::uint64_t{4095};

iovec Remote(std::uint64_t address, std::uint64_t bytes) {
  return {.iov_base = kernels::PointerAt(address), .iov_len = static_cast<std::size_t>(bytes)};
}

std::string YamaNote() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = -1;
  if (!(file >> scope)) return "";
  return fmt::format(", ptrace_scope {}", scope);
}

}  // namespace

CmaMemory::CmaMemory(ProcessHandle process, std::shared_ptr<StagePool> stages)
    : process_(std::move(process)), stages_(std::move(stages)) {}

Result<std::shared_ptr<CmaMemory>> CmaMemory::Create(ProcessHandle process,
                                                     std::span<const PrivateSegment> segments,
                                                     bool writable,
                                                     std::shared_ptr<StagePool> stages) {
  std::shared_ptr<CmaMemory> memory(new CmaMemory(std::move(process), std::move(stages)));
  TB_RETURN_IF_ERROR(memory->Probe(segments, writable));
  return memory;
}

// Reads are tried for real, on the first and last byte of every segment. A write that changes
// nothing does not exist while the owner runs: the permission to write is asked of the kernel at an
// address that cannot be written, and whether the pages can be is read from the owner's map.
Status CmaMemory::Probe(std::span<const PrivateSegment> segments, bool writable) {
  std::vector<PrivateSegment> ends;
  for (const PrivateSegment& segment : segments) {
    if (segment.bytes == 0) continue;
    ends.push_back({.address = segment.address, .bytes = 1});
    ends.push_back({.address = segment.address + segment.bytes - 1, .bytes = 1});
  }
  std::vector<std::byte> bytes(ends.size());
  TB_RETURN_IF_ERROR(MoveRuns(Direction::kRead, ends, bytes));
  if (writable) {
    std::byte nothing{};
    const iovec local = {.iov_base = &nothing, .iov_len = 1};
    const iovec remote = Remote(kNowhere, 1);
    if (::process_vm_writev(process_.pid(), &local, 1, &remote, 1, 0) < 0 && errno != EFAULT) {
      return Refused(Direction::kWrite, errno, kNowhere);
    }
    TB_RETURN_IF_ERROR(CheckWritable(segments));
  }
  return process_.Check();
}

Status CmaMemory::CheckWritable(std::span<const PrivateSegment> segments) const {
  std::vector<PrivateSegment> rest(segments.begin(), segments.end());
  std::erase_if(rest, [](const PrivateSegment& segment) { return segment.bytes == 0; });
  std::sort(rest.begin(), rest.end(),
            [](const PrivateSegment& a, const PrivateSegment& b) { return a.address < b.address; });
  std::ifstream file(fmt::format("/proc/{}/maps", process_.pid()));
  std::string line;
  std::size_t at = 0;
  while (at < rest.size() && std::getline(file, line)) {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s", &begin, &end, access) != 3) break;
    if (access[1] != 'w') continue;
    // Takes what this mapping covers off the front of the segments that begin in it.
    while (at < rest.size() && rest[at].address >= begin && rest[at].address < end) {
      const std::uint64_t covered = std::min(end - rest[at].address, rest[at].bytes);
      rest[at].address += covered;
      rest[at].bytes -= covered;
      if (rest[at].bytes != 0) break;
      ++at;
    }
  }
  if (at == rest.size()) return {};
  return {Code::kInvalidArgument,
          fmt::format("{} has no writable memory at {:#x}, where its tensors should be",
                      process_.owner(), rest[at].address),
          Reason::kMalformed};
}

Result<transport::ForeignStage> CmaMemory::Borrow(TimePoint deadline) {
  return stages_->Borrow(deadline);
}

Status CmaMemory::Read(std::span<const transport::ForeignPart> parts, std::span<std::byte> out,
                       TimePoint deadline) {
  return Move(Direction::kRead, parts, out, deadline);
}

Status CmaMemory::Write(std::span<const transport::ForeignPart> parts,
                        std::span<const std::byte> in, TimePoint deadline) {
  // iovec has no const; a write only reads it.
  return Move(Direction::kWrite, parts, {const_cast<std::byte*>(in.data()), in.size()}, deadline);
}

Status CmaMemory::Move(Direction direction, std::span<const transport::ForeignPart> parts,
                       std::span<std::byte> local, TimePoint deadline) {
  TB_RETURN_IF_ERROR(process_.Check());
  std::vector<PrivateSegment> runs;
  runs.reserve(kRunsPerCall);
  std::uint64_t bytes = 0;
  const auto flush = [&]() -> Status {
    if (std::chrono::steady_clock::now() >= deadline) {
      return {Code::kDeadlineExceeded,
              fmt::format("deadline passed while the memory of {} was copied", process_.owner())};
    }
    TB_RETURN_IF_ERROR(MoveRuns(direction, runs, local.first(bytes)));
    local = local.subspan(bytes);
    runs.clear();
    bytes = 0;
    return {};
  };
  for (const transport::ForeignPart& part : parts) {
    if (part.count == 0) continue;
    kernels::Walk<1> walk = kernels::MemoryWalk(*part.block);
    walk.Seek(part.first);
    for (std::uint64_t left = part.count; left != 0;) {
      const auto run = walk.Next(std::min(left, walk.left_in_run()));
      left -= run.bytes;
      bytes += run.bytes;
      // What lies end to end there is one run for the kernel, which pays by the run.
      if (!runs.empty() && runs.back().address + runs.back().bytes == run.at[0]) {
        runs.back().bytes += run.bytes;
        continue;
      }
      if (runs.size() == kRunsPerCall) {
        bytes -= run.bytes;
        TB_RETURN_IF_ERROR(flush());
        bytes = run.bytes;
      }
      runs.push_back({.address = run.at[0], .bytes = run.bytes});
    }
  }
  if (!runs.empty()) TB_RETURN_IF_ERROR(flush());
  TB_CHECK(local.empty());
  return process_.Check();
}

Status CmaMemory::MoveRuns(Direction direction, std::span<const PrivateSegment> remote,
                           std::span<std::byte> local) {
  std::uint64_t done_in_first = 0;
  while (!remote.empty()) {
    std::array<iovec, kRunsPerCall> there;
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    for (const PrivateSegment& run : remote.first(std::min(remote.size(), there.size()))) {
      const std::uint64_t skip = count == 0 ? done_in_first : 0;
      there[count++] = Remote(run.address + skip, run.bytes - skip);
      bytes += run.bytes - skip;
    }
    const iovec here = {.iov_base = local.data(), .iov_len = static_cast<std::size_t>(bytes)};
    const ssize_t moved =
        direction == Direction::kRead
            ? ::process_vm_readv(process_.pid(), &here, 1, there.data(), count, 0)
            : ::process_vm_writev(process_.pid(), &here, 1, there.data(), count, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      return Refused(direction, moved < 0 ? errno : EFAULT, remote.front().address + done_in_first);
    }
    // Less than asked for: the kernel stopped at a bad page, which the next call will name, or at
    // its bound of 2 GiB.
    local = local.subspan(static_cast<std::size_t>(moved));
    std::uint64_t left = static_cast<std::uint64_t>(moved);
    while (left != 0) {
      const std::uint64_t in_run = remote.front().bytes - done_in_first;
      if (left < in_run) {
        done_in_first += left;
        break;
      }
      left -= in_run;
      done_in_first = 0;
      remote = remote.subspan(1);
    }
  }
  return {};
}

Status CmaMemory::Refused(Direction direction, int error_number, std::uint64_t address) const {
  if (const Status gone = process_.Check(); !gone.ok()) return gone;
  const char* const verb = direction == Direction::kRead ? "read" : "write";
  switch (error_number) {
    case ESRCH:
      return {Code::kUnavailable, fmt::format("{} is gone", process_.owner()), Reason::kPeerLost,
              error_number};
    case EFAULT:
      return {Code::kInvalidArgument,
              fmt::format("{} has no memory to {} at {:#x}, where its tensors should be",
                          process_.owner(), verb, address),
              Reason::kMovedMemory, error_number};
    case EPERM:
    case EACCES:
      return {Code::kPermissionDenied,
              fmt::format("the kernel does not let the agent {} the memory of {} (process {}{}); "
                          "run both as one user, or use bucket mode",
                          verb, process_.owner(), process_.pid(), YamaNote()),
              Reason::kUnsupported, error_number};
    default:
      return ErrnoStatus(error_number, fmt::format("process_vm_{}v of {}", verb, process_.owner()));
  }
}

double CmaMemory::MeasureSpeed(std::span<const PrivateSegment> segments) {
  const auto largest = std::max_element(
      segments.begin(), segments.end(),
      [](const PrivateSegment& a, const PrivateSegment& b) { return a.bytes < b.bytes; });
  if (largest == segments.end() || largest->bytes == 0) return 0;
  const auto stage = stages_->Borrow(std::chrono::steady_clock::now() + std::chrono::seconds(1));
  if (!stage.ok()) return 0;
  const PrivateSegment part = {
      .address = largest->address,
      .bytes = std::min<std::uint64_t>(largest->bytes, stage->bytes.size())};
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    if (!MoveRuns(Direction::kRead, {&part, 1}, stage->bytes).ok()) return 0;
    const double seconds = Seconds(std::chrono::steady_clock::now() - begin);
    if (seconds > 0) best = std::max(best, static_cast<double>(part.bytes) / seconds / 1e9);
  }
  return best;
}

}  // namespace tensorbus::agent
