#include "worker_shim/arena.h"

#include <bit>
#include <cerrno>
#include <fmt/format.h>
#include <sys/mman.h>

#include "tensorbus/base/mapping.h"

namespace tensorbus::worker_shim {
namespace {

/// Maps `fd` at a multiple of `alignment`: reserves more address space than needed, then gives the
/// rest back.
Result<std::byte*> MapAligned(int fd, std::uint64_t bytes, std::uint64_t alignment) {
  const std::uint64_t room = bytes + alignment;
  void* const reserved = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) {
    return ErrnoStatus(errno, fmt::format("address space for an arena of {} bytes", bytes));
  }
  auto* const begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uint64_t skip = (alignment - address % alignment) % alignment;
  auto* const data = begin + skip;
  if (::mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, room);
    return ErrnoStatus(error, fmt::format("mapping an arena of {} bytes", bytes));
  }
  const std::uint64_t page = 4096;
  const std::uint64_t end = skip + (bytes + page - 1) / page * page;
  if (skip > 0) ::munmap(begin, skip);
  if (end < room) ::munmap(begin + end, room - end);
  return data;
}

}  // namespace

Result<Arena> Arena::Create(std::uint64_t bytes) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "an arena of 0 bytes");
  if (bytes > (std::uint64_t{1} << 46)) {
    return Status(Code::kResourceExhausted, fmt::format("an arena of {} bytes", bytes),
                  Reason::kOutOfMemory);
  }
  TB_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd("tensorbus-arena", bytes));
  const bool huge = bytes >= kHugePagesFromBytes;
  TB_ASSIGN_OR_RETURN(std::byte* const data,
                      MapAligned(fd.get(), bytes, huge ? kHugePageBytes : 4096));
  // A wish: kernels without huge pages for shared memory say no, and small pages work too.
  if (huge) ::madvise(data, bytes, MADV_HUGEPAGE);
  return Arena(std::move(fd), data, bytes);
}

Arena::Arena(Arena&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      used_(other.used()) {}

Arena::~Arena() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Result<std::uint64_t> Arena::Allocate(std::uint64_t bytes, std::uint64_t alignment) {
  if (!std::has_single_bit(alignment) || alignment > kAlignmentMax) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("alignment {}: a power of two up to {} is needed", alignment, kAlignmentMax));
  }
  MutexLock lock(mutex_);
  const std::uint64_t offset = (used_ + alignment - 1) & ~(alignment - 1);
  if (offset > size_ || bytes > size_ - offset) {
    return Status(
        Code::kResourceExhausted,
        fmt::format("{} bytes do not fit into the arena: {} of {} are used", bytes, used_, size_),
        Reason::kOutOfMemory);
  }
  used_ = offset + bytes;
  return offset;
}

std::uint64_t Arena::used() const {
  MutexLock lock(mutex_);
  return used_;
}

}  // namespace tensorbus::worker_shim
