#include "tensorbus/cli/bench_pattern.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>

#include "tensorbus/base/check.h"

namespace tensorbus::cli {
namespace {

constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint32_t kStep = 0x9E3779B1;  // odd: 2^32 elements before the form repeats
constexpr std::size_t kGroup = 16;           // elements a compiler turns into vectors

std::uint64_t RoundUp(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

/// The element whose hash is `h`: its high bits, which change most from one index to the next.
template <typename T>
T ValueOf(std::uint32_t h) {
  if constexpr (sizeof(T) == 8) {
    return (static_cast<std::uint64_t>(h) << 32) | static_cast<std::uint32_t>(~h);
  } else {
    return static_cast<T>(h >> (32 - 8 * sizeof(T)));
  }
}

template <typename T>
void FillTyped(std::byte* row, std::uint32_t h, std::uint64_t count) {
  std::uint64_t i = 0;
  std::array<T, kGroup> group;
  for (; i + kGroup <= count; i += kGroup, h += kGroup * kStep) {
    for (std::uint32_t j = 0; j < kGroup; ++j) group[j] = ValueOf<T>(h + j * kStep);
    std::memcpy(row + i * sizeof(T), group.data(), sizeof group);
  }
  for (; i < count; ++i, h += kStep) {
    const T value = ValueOf<T>(h);
    std::memcpy(row + i * sizeof(T), &value, sizeof value);
  }
}

template <typename T>
std::optional<std::uint64_t> CheckTyped(const std::byte* row, std::uint32_t h,
                                        std::uint64_t count) {
  std::uint64_t i = 0;
  std::array<T, kGroup> group;
  for (; i + kGroup <= count; i += kGroup, h += kGroup * kStep) {
    std::memcpy(group.data(), row + i * sizeof(T), sizeof group);
    T different = 0;
    for (std::uint32_t j = 0; j < kGroup; ++j) different |= group[j] ^ ValueOf<T>(h + j * kStep);
    if (different != 0) break;
  }
  for (; i < count; ++i, h += kStep) {
    T value;
    std::memcpy(&value, row + i * sizeof(T), sizeof value);
    if (value != ValueOf<T>(h)) return i;
  }
  return std::nullopt;
}

/// Calls `row(offset in bytes, global linear index, elements)` for each stretch of a piece that is
/// contiguous in the tensor's index space; stops when it returns false.
template <typename Row>
void ForEachRow(const ArenaPiece& piece, const TensorSpec& spec, const Row& row) {
  const int rank = piece.box.rank();
  const std::uint32_t item = ItemBytes(spec.dtype);
  // Trailing dimensions that the box covers whole, and one more, make one stretch.
  std::uint64_t stretch = 1;
  int outer = rank;
  while (outer > 0) {
    --outer;
    stretch *= piece.box[outer].size();
    if (piece.box[outer].size() != spec.shape[outer]) break;
  }
  const std::uint64_t rows = stretch == 0 ? 0 : piece.box.volume() / stretch;
  std::array<std::uint64_t, kMaxDims> at = {};
  for (std::uint64_t r = 0; r < rows; ++r) {
    std::uint64_t index = 0;
    for (int d = 0; d < rank; ++d) {
      index = index * spec.shape[d] + piece.box[d].lo + at[static_cast<std::size_t>(d)];
    }
    if (!row(piece.offset + r * stretch * item, index, stretch)) return;
    for (int d = outer - 1; d >= 0; --d) {
      std::uint64_t& digit = at[static_cast<std::size_t>(d)];
      if (++digit < piece.box[d].size()) break;
      digit = 0;
    }
  }
}

std::string HexOf(const std::byte* value, std::uint32_t bytes) {
  std::string text;
  for (std::uint32_t i = bytes; i-- > 0;) {
    text += fmt::format("{:02x}", static_cast<unsigned>(value[i]));
  }
  return text;
}

}  // namespace

std::uint32_t PatternKey(std::uint64_t version, std::string_view tensor) {
  // FNV-1a over the name, then splitmix64's finalizer over both.
  std::uint64_t x = 0xCBF29CE484222325;
  for (const char c : tensor) x = (x ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  x += version * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return static_cast<std::uint32_t>((x ^ (x >> 31)) >> 16);
}

void FillRow(std::byte* row, std::uint64_t first, std::uint64_t count, std::uint32_t item_bytes,
             std::uint32_t key) {
  const std::uint32_t h = static_cast<std::uint32_t>(first) * kStep + key;
  switch (item_bytes) {
    case 1:
      return FillTyped<std::uint8_t>(row, h, count);
    case 2:
      return FillTyped<std::uint16_t>(row, h, count);
    case 4:
      return FillTyped<std::uint32_t>(row, h, count);
    default:
      TB_CHECK(item_bytes == 8);
      return FillTyped<std::uint64_t>(row, h, count);
  }
}

std::optional<std::uint64_t> CheckRow(const std::byte* row, std::uint64_t first,
                                      std::uint64_t count, std::uint32_t item_bytes,
                                      std::uint32_t key) {
  const std::uint32_t h = static_cast<std::uint32_t>(first) * kStep + key;
  switch (item_bytes) {
    case 1:
      return CheckTyped<std::uint8_t>(row, h, count);
    case 2:
      return CheckTyped<std::uint16_t>(row, h, count);
    case 4:
      return CheckTyped<std::uint32_t>(row, h, count);
    default:
      TB_CHECK(item_bytes == 8);
      return CheckTyped<std::uint64_t>(row, h, count);
  }
}

RankArena PlaceRank(const JobLayout& layout, std::uint32_t rank) {
  RankArena arena;
  std::uint64_t offset = 0;
  for (std::size_t t = 0; t < layout.tensors.size(); ++t) {
    const JobLayout::Tensor& tensor = layout.tensors[t];
    for (const RankBoxes& held : layout.HoldingOf(tensor).ranks) {
      if (held.rank != rank) continue;
      for (const Box& box : held.boxes) {
        arena.pieces.push_back({static_cast<std::uint32_t>(t), box, offset});
        offset = RoundUp(offset + box.volume() * ItemBytes(tensor.spec.dtype), kAlignment);
      }
    }
  }
  arena.bytes = RoundUp(std::max<std::uint64_t>(offset, 1), kPageBytes);
  return arena;
}

void FillArena(const JobLayout& layout, const RankArena& arena, std::uint64_t version,
               std::byte* base) {
  for (const ArenaPiece& piece : arena.pieces) {
    const TensorSpec& spec = layout.tensors[piece.tensor].spec;
    const std::uint32_t key = PatternKey(version, spec.name);
    const std::uint32_t item = ItemBytes(spec.dtype);
    ForEachRow(piece, spec, [&](std::uint64_t offset, std::uint64_t index, std::uint64_t count) {
      FillRow(base + offset, index, count, item, key);
      return true;
    });
  }
}

Status CheckArena(const JobLayout& layout, const RankArena& arena, std::uint64_t version,
                  const std::byte* base) {
  for (const ArenaPiece& piece : arena.pieces) {
    const TensorSpec& spec = layout.tensors[piece.tensor].spec;
    const std::uint32_t key = PatternKey(version, spec.name);
    const std::uint32_t item = ItemBytes(spec.dtype);
    Status wrong;
    ForEachRow(piece, spec, [&](std::uint64_t offset, std::uint64_t index, std::uint64_t count) {
      const auto at = CheckRow(base + offset, index, count, item, key);
      if (!at.has_value()) return true;
      std::array<std::byte, 8> wanted = {};
      FillRow(wanted.data(), index + *at, 1, item, key);
      wrong = Status(Code::kDataLoss,
                     fmt::format("version {}: tensor '{}' element {} is {}, not {}", version,
                                 spec.name, index + *at, HexOf(base + offset + *at * item, item),
                                 HexOf(wanted.data(), item)),
                     Reason::kChecksumMismatch);
      return false;
    });
    if (!wrong.ok()) return wrong;
  }
  return {};
}

}  // namespace tensorbus::cli
