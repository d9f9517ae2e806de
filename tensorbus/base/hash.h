#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tensorbus/base/status.h"

struct XXH3_state_s;  // xxHash's own; its header stays out of ours

namespace tensorbus {

/// 128 bits of XXH3, as two halves. Identifies plans, layouts and messages; not for adversaries.
struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  friend auto operator<=>(const Hash128&, const Hash128&) = default;

  /// 32 hex digits, high half first (XXH3's canonical order).
  std::string ToHex() const;
  static Result<Hash128> FromHex(std::string_view hex);
};

/// XXH3-128 of `bytes`, seed 0.
Hash128 HashOf(std::span<const std::byte> bytes);
Hash128 HashOf(std::string_view bytes);

/// XXH3-64 of `bytes`, seed 0; guards a TCP window or a small record.
std::uint64_t Checksum64(std::span<const std::byte> bytes);

/// Checksum64() of bytes that come piece by piece: any cut gives the same value. Confined.
class Checksum64Stream {
 public:
  Checksum64Stream();
  Checksum64Stream(const Checksum64Stream&) = delete;
  Checksum64Stream& operator=(const Checksum64Stream&) = delete;
  ~Checksum64Stream();

  /// Back to the state of no bytes.
  void Reset();
  void Add(std::span<const std::byte> bytes);
  std::uint64_t Finish() const;

 private:
  XXH3_state_s* state_;
};

/// XXH3-128 over a stream of values, fed piece by piece. Integers go in little-endian, strings with
/// their length, so that two different sequences never collide by concatenation. Confined.
class Hasher {
 public:
  Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;
  ~Hasher();

  void AddBytes(std::span<const std::byte> bytes);
  void AddString(std::string_view text);
  void AddU8(std::uint8_t value);
  void AddU32(std::uint32_t value);
  void AddU64(std::uint64_t value);
  Hash128 Finish() const;

 private:
  XXH3_state_s* state_;
};

}  // namespace tensorbus
