#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tensorbus/types/box.h"

namespace tensorbus {

/// Key of a tensor's digest: XXH3-128 over channel, tensor name and dtype.
struct DigestKey {
  std::uint64_t a = 0;
  std::uint64_t b = 0;

  friend bool operator==(const DigestKey&, const DigestKey&) = default;
};

/// The two sums of the positional digest and the bytes that went in. Additive over any cut of a
/// tensor.
struct DigestSum {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  std::uint64_t bytes = 0;

  DigestSum& operator+=(const DigestSum& other) {
    a += other.a;
    b += other.b;
    bytes += other.bytes;
    return *this;
  }
  friend bool operator==(const DigestSum&, const DigestSum&) = default;
};

/// One box of elements in this process's memory, with its place in the logical tensor's byte
/// stream.
///
/// Element (i0, i1, …) is `item_bytes` bytes at `base + Σ i_k * strides[k]`, and stands at byte
/// `stream_offset + Σ i_k * stream_strides[k]` of the tensor's row-major stream. Borrows the
/// memory.
struct StridedBlock {
  std::byte* base = nullptr;
  std::uint8_t rank = 0;
  std::uint32_t item_bytes = 1;
  std::array<std::uint64_t, kMaxDims> extents = {};
  std::array<std::uint64_t, kMaxDims> strides = {};         ///< bytes
  std::array<std::uint64_t, kMaxDims> stream_strides = {};  ///< bytes
  std::uint64_t stream_offset = 0;                          ///< bytes
  DigestKey key;

  std::uint64_t elements() const {
    std::uint64_t product = 1;
    for (int d = 0; d < rank; ++d) product *= extents[static_cast<std::size_t>(d)];
    return product;
  }
  std::uint64_t bytes() const { return elements() * item_bytes; }
};

}  // namespace tensorbus
