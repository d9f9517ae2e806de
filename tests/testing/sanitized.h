#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tensorbus::testing {

/// Whether this program runs under a sanitizer: many times slower, and freed memory is kept for a
/// while, so that speed, size and memory in use say little.
#if defined(__has_feature)  // clang
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// Whether a test over all shipped manifests leaves the one at `path` to a program without a
/// sanitizer: those of more than ten thousand tensors, where one takes a minute and shows no more.
inline bool LeftOut(const std::string& path) {
  constexpr std::uintmax_t kLargestBytes = 50'000;
  return kSanitized && std::filesystem::file_size(path) > kLargestBytes;
}

}  // namespace tensorbus::testing
