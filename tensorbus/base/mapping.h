#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus {

/// Owns one mmap of a descriptor; unmaps when it dies. Move-only, immutable after creation.
class Mapping {
 public:
  enum class Access { kRead, kReadWrite };

  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  /// Maps the first `bytes` of `fd`, shared. The descriptor is borrowed and may be closed
  /// afterwards.
  ///
  /// Errors: kInvalidArgument when the object behind `fd` is shorter than `bytes` (a later access
  /// would be SIGBUS); kResourceExhausted when the address space is.
  static Result<Mapping> Create(int fd, std::uint64_t bytes, Access access);

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_, static_cast<std::size_t>(size_)}; }

 private:
  Mapping(std::byte* data, std::uint64_t size) : data_(data), size_(size) {}

  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

/// Makes an anonymous shared-memory object of `bytes`, close-on-exec, sealed against shrinking so
/// that a mapping of it can never fault for lack of a page behind it. `name` shows up in /proc
/// only.
Result<UniqueFd> CreateMemfd(std::string_view name, std::uint64_t bytes);

/// Asks the kernel for every page (MADV_POPULATE_WRITE), so that later access takes no fault; keeps
/// the contents. Kernels before 5.14 cannot be asked: there it does nothing.
/// Errors: kResourceExhausted (kOutOfMemory) when there are not enough pages, never a SIGBUS; when
/// the kernel puts it off for longer than a second.
Status TouchPages(std::span<std::byte> memory);

}  // namespace tensorbus
