#pragma once

#include <cstdint>

#include "tensorbus/types/strided.h"

namespace tensorbus::kernels {

/// Constants of the positional digest ("PAD-128", docs/integrity.md). Everything is modulo 2^64.
inline constexpr std::uint32_t kDigestBlockBytes = 4096;
inline constexpr std::uint32_t kDigestBlockWords = kDigestBlockBytes / 4;
/// Sum b uses the keys of sum a this many words further on.
inline constexpr std::uint32_t kDigestKeyShift = 16;
inline constexpr std::uint32_t kDigestKeyCount = kDigestBlockWords + kDigestKeyShift;
/// What a word's four "+ 1" add up to.
inline constexpr std::uint64_t kDigestOnes = 0x01010101;
inline constexpr std::uint64_t kDigestGamma = 0x9E3779B97F4A7C15;
inline constexpr std::uint64_t kDigestTableSeed = 0x54656E736F726275;  // "Tensorbu"

/// The finalizer of splitmix64.
constexpr std::uint64_t DigestMix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

/// Multiplier of block `block` (of 4 KiB) for one half of a key; always odd.
constexpr std::uint64_t DigestMultiplier(std::uint64_t half_key, std::uint64_t block) {
  return DigestMix(half_key + (block + 1) * kDigestGamma) | 1;
}

/// Word keys and their prefix sums; shared by all tensors. 16 spare zeros let a vector load run
/// over the end.
struct DigestTable {
  alignas(64) std::uint32_t keys[kDigestKeyCount + 16] = {};
  std::uint64_t prefix[kDigestKeyCount + 1] = {};  ///< prefix[i] = keys[0] + … + keys[i-1]

  constexpr DigestTable() {
    for (std::uint32_t i = 0; i < kDigestKeyCount; ++i) {
      keys[i] =
          static_cast<std::uint32_t>(DigestMix(kDigestTableSeed + (i + 1) * kDigestGamma) >> 32) |
          1;
      prefix[i + 1] = prefix[i] + keys[i];
    }
  }
};
inline constexpr DigestTable kDigestTable{};

}  // namespace tensorbus::kernels
