#include "tensorbus/base/mapping.h"

#include <cerrno>
#include <chrono>
#include <fcntl.h>
#include <fmt/format.h>
#include <limits>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>

namespace tensorbus {
namespace {

/// Signals interrupt populating, and the kernel may be short of something for a moment. Pages that
/// are there stay, so every attempt gets further.
constexpr int kPopulateAttempts = 1000;
constexpr std::chrono::milliseconds kPopulatePause{1};

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    Mapping dying(data_, size_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(size_));
}

Result<Mapping> Mapping::Create(int fd, std::uint64_t bytes, Access access) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return ErrnoStatus(errno, "fstat of shared memory");
  if (bytes == 0 || bytes > static_cast<std::uint64_t>(info.st_size)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("shared memory has {} bytes, {} were announced", info.st_size, bytes),
                  Reason::kMalformed);
  }
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, static_cast<std::size_t>(bytes), protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return ErrnoStatus(errno, fmt::format("mmap of {} bytes", bytes));
  return Mapping(static_cast<std::byte*>(data), bytes);
}

Result<UniqueFd> CreateMemfd(std::string_view name, std::uint64_t bytes) {
  if (bytes == 0 || bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    return Status(Code::kInvalidArgument, fmt::format("shared memory of {} bytes", bytes),
                  Reason::kMalformed);
  }
  UniqueFd fd(::memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoStatus(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(errno, fmt::format("shared memory of {} bytes", bytes));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ErrnoStatus(errno, "sealing shared memory");
  }
  return fd;
}

Status TouchPages(std::span<std::byte> memory) {
  if (memory.empty()) return {};
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data()) & ~(page - 1);
  const auto end =
      (reinterpret_cast<std::uintptr_t>(memory.data()) + memory.size() + page - 1) & ~(page - 1);
  int error = 0;
  for (int attempt = 0; attempt < kPopulateAttempts; ++attempt) {
    if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) == 0) return {};
    error = errno;
    if (error == EINVAL) return {};  // a kernel before 5.14: pages come on first touch instead
    if (error != EINTR && error != EAGAIN) break;
    if (error == EAGAIN) std::this_thread::sleep_for(kPopulatePause);
  }
  return Status(Code::kResourceExhausted,
                fmt::format("not enough memory behind {} bytes of shared memory", memory.size()),
                Reason::kOutOfMemory, error);
}

}  // namespace tensorbus
