#pragma once

// Leaf kernels as templates over a vector type; included by one source file per instruction set.
// Everything has internal linkage: code compiled with wider instructions must never be what the
// linker picks for another file.

#include <cstring>

#include "tensorbus/kernels/digest_table.h"
#include "tensorbus/kernels/run_kernels.h"

namespace tensorbus::kernels {
namespace {

enum class Store { kNone, kPlain, kStream };

/// Inner sums of one 4 KiB block, before the block's multipliers.
struct BlockSums {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
};

inline std::size_t Least(std::size_t x, std::size_t y) {
  return x < y ? x : y;
}

inline std::uint32_t LoadWord(const std::byte* at) {
  std::uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline void AddWord(BlockSums& sums, std::uint64_t value, std::uint32_t word) {
  sums.a += value * kDigestTable.keys[word];
  sums.b += value * kDigestTable.keys[word + kDigestKeyShift];
}

/// Bytes memory[0, count) are bytes `phase`… of word `word`; their "+ 1" goes in here.
inline void AddPartialWord(BlockSums& sums, const std::byte* memory, std::uint32_t word,
                           std::uint32_t phase, std::uint32_t count) {
  std::uint64_t value = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    value += (static_cast<std::uint64_t>(memory[i]) + 1) << (8 * (phase + i));
  }
  AddWord(sums, value, word);
}

/// What `words` whole words from word `word` of a block add for their "+ 1", from the prefix sums
/// of the keys.
inline void AddCover(BlockSums& sums, std::uint32_t word, std::uint32_t words) {
  const std::uint64_t* prefix = kDigestTable.prefix + word;
  sums.a += kDigestOnes * (prefix[words] - prefix[0]);
  sums.b += kDigestOnes * (prefix[words + kDigestKeyShift] - prefix[kDigestKeyShift]);
}

/// A block's sums are complete, or all that this call has of them.
inline void AddBlock(DigestSum& sum, const DigestKey& key, std::uint64_t block,
                     const BlockSums& sums) {
  sum.a += sums.a * DigestMultiplier(key.a, block);
  sum.b += sums.b * DigestMultiplier(key.b, block);
}

/// A run inside one block. V::Words() takes the whole words, without their "+ 1".
template <class V, Store kStore, bool kAhead>
inline void AddSegment(DigestSum& sum, const DigestKey& key, std::byte* target,
                       const std::byte* source, std::uint64_t offset, std::size_t bytes,
                       const std::byte* ahead) {
  const std::uint64_t block = offset / kDigestBlockBytes;
  auto word = static_cast<std::uint32_t>(offset % kDigestBlockBytes / 4);
  const auto phase = static_cast<std::uint32_t>(offset % 4);
  BlockSums sums;
  sum.bytes += bytes;
  if (phase != 0) {
    const auto head = static_cast<std::uint32_t>(Least(4 - phase, bytes));
    AddPartialWord(sums, source, word, phase, head);
    if constexpr (kStore != Store::kNone) {
      std::memcpy(target, source, head);
      target += head;
    }
    source += head;
    bytes -= head;
    ++word;
  }
  const auto words = static_cast<std::uint32_t>(bytes / 4);
  if (words != 0) {
    typename V::Lanes lanes;
    V::template Words<kStore, kAhead>(lanes, sums, target, source, words, word, ahead);
    lanes.AddTo(sums);
    AddCover(sums, word, words);
  }
  if (const auto tail = static_cast<std::uint32_t>(bytes % 4); tail != 0) {
    const std::size_t at = std::size_t{4} * words;
    AddPartialWord(sums, source + at, word + words, 0, tail);
    if constexpr (kStore != Store::kNone) std::memcpy(target + at, source + at, tail);
  }
  AddBlock(sum, key, block, sums);
}

template <class V, Store kStore, bool kAhead = false>
inline void AddRun(DigestSum& sum, const DigestKey& key, std::byte* target, const std::byte* source,
                   std::uint64_t offset, std::size_t bytes, const std::byte* ahead = nullptr) {
  while (bytes != 0) {
    const std::size_t part = Least(bytes, kDigestBlockBytes - offset % kDigestBlockBytes);
    AddSegment<V, kStore, kAhead>(sum, key, target, source, offset, part, ahead);
    if constexpr (kStore != Store::kNone) target += part;
    if constexpr (kAhead) ahead += part;
    source += part;
    offset += part;
    bytes -= part;
  }
}

/// Rows of whole words that cross no block's edge share the lanes' sums as long as they stay in one
/// block; any other row is a run of its own.
template <class V, Store kStore>
inline void AddRows(DigestSum& sum, const DigestKey& key, const RunKernels::Rows& rows,
                    std::byte* target, const std::byte* source, std::uint64_t offset) {
  typename V::Lanes lanes;
  BlockSums sums;
  std::uint64_t block = offset / kDigestBlockBytes;
  const auto words = static_cast<std::uint32_t>(rows.bytes / 4);
  for (std::uint64_t k = 0; k < rows.count; ++k) {
    const std::uint64_t within = offset % kDigestBlockBytes;
    if (((within | rows.bytes) & 3) != 0 || within + rows.bytes > kDigestBlockBytes) {
      AddRun<V, kStore>(sum, key, target, source, offset, rows.bytes);
    } else {
      if (offset / kDigestBlockBytes != block) {
        lanes.AddTo(sums);
        AddBlock(sum, key, block, sums);
        lanes = {};
        sums = {};
        block = offset / kDigestBlockBytes;
      }
      const auto word = static_cast<std::uint32_t>(within / 4);
      V::template Words<kStore, false>(lanes, sums, target, source, words, word, nullptr);
      AddCover(sums, word, words);
      sum.bytes += rows.bytes;
    }
    if constexpr (kStore != Store::kNone) target += rows.target_pitch;
    source += rows.source_pitch;
    offset += rows.offset_pitch;
  }
  lanes.AddTo(sums);
  AddBlock(sum, key, block, sums);
}

/// Streaming needs whole target lines. When those do not fall together with the stream's words, a
/// stretch is copied first and its source digested from cache.
template <class V>
inline void StreamRun(DigestSum& sum, const DigestKey& key, std::byte* target,
                      const std::byte* source, std::uint64_t offset, std::size_t bytes) {
  constexpr std::size_t kStretch = 8192;
  if (((reinterpret_cast<std::uintptr_t>(target) | offset) & 63) == 0) {
    AddRun<V, Store::kStream>(sum, key, target, source, offset, bytes);
    return;
  }
  while (bytes != 0) {
    std::size_t part = Least(bytes, kStretch);
    // Cut where target lines end, so that every line is written once.
    if (part < bytes) part -= (reinterpret_cast<std::uintptr_t>(target) + part) & 63;
    V::Stream(target, source, part);
    AddRun<V, Store::kNone>(sum, key, nullptr, source, offset, part);
    target += part;
    source += part;
    offset += part;
    bytes -= part;
  }
}

template <class V>
RunKernels MakeRunKernels(std::string_view name) {
  return {
      .name = name,
      .digest =
          [](DigestSum& sum, const DigestKey& key, const std::byte* memory, std::uint64_t offset,
             std::size_t bytes) {
            AddRun<V, Store::kNone>(sum, key, nullptr, memory, offset, bytes);
          },
      .digest_ahead =
          [](DigestSum& sum, const DigestKey& key, const std::byte* memory, std::uint64_t offset,
             std::size_t bytes, const std::byte* ahead) {
            AddRun<V, Store::kNone, true>(sum, key, nullptr, memory, offset, bytes, ahead);
          },
      .copy_digest =
          [](DigestSum& sum, const DigestKey& key, std::byte* target, const std::byte* source,
             std::uint64_t offset, std::size_t bytes) {
            AddRun<V, Store::kPlain>(sum, key, target, source, offset, bytes);
          },
      .digest_rows =
          [](DigestSum& sum, const DigestKey& key, const RunKernels::Rows& rows,
             const std::byte* memory, std::uint64_t offset) {
            AddRows<V, Store::kNone>(sum, key, rows, nullptr, memory, offset);
          },
      .copy_digest_rows = AddRows<V, Store::kPlain>,
      .stream_digest = StreamRun<V>,
      .copy = V::Copy,
      .stream = V::Stream,
      .fence = V::Fence,
  };
}

}  // namespace
}  // namespace tensorbus::kernels
