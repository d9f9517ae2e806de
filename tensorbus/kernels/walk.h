#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "tensorbus/base/check.h"
#include "tensorbus/types/strided.h"

namespace tensorbus::kernels {

/// Walks one index space in row-major order and gives N addresses (memory or stream positions)
/// for every stretch that is contiguous in all of them. Neighbouring dimensions that lie end to end
/// in all N are merged first. Confined; holds no memory of its own.
template <int N>
class Walk {
 public:
  using Strides = std::array<std::uint64_t, kMaxDims>;
  using Addresses = std::array<std::uint64_t, N>;

  /// `count` runs of `bytes` bytes; run k is at `at[i] + k * pitch[i]`.
  struct Rows {
    Addresses at;
    Addresses pitch;
    std::uint64_t bytes;
    std::uint64_t count;
  };

  /// The index space is that of `block`; `strides` are borrowed for the call.
  Walk(const StridedBlock& block, const std::array<const Strides*, N>& strides,
       const Addresses& start)
      : at_(start), start_(start), run_(block.item_bytes) {
    for (int d = block.rank - 1; d >= 0; --d) {
      const auto dim = static_cast<std::size_t>(d);
      if (block.extents[dim] == 1) continue;
      Loop loop{.extent = block.extents[dim]};
      for (std::size_t i = 0; i < N; ++i) loop.stride[i] = (*strides[i])[dim];
      Append(loop);
    }
  }

  /// Bytes of the stretches it gives when nothing limits them.
  std::uint64_t run_bytes() const { return run_; }
  /// Where the next byte is.
  std::uint64_t at(int which) const { return at_[static_cast<std::size_t>(which)] + within_; }
  /// Bytes from here to the end of the current run.
  std::uint64_t left_in_run() const { return run_ - within_; }

  /// Goes to a byte of the row-major order; it must be inside.
  void Seek(std::uint64_t byte) {
    within_ = byte % run_;
    std::uint64_t run_index = byte / run_;
    at_ = start_;
    for (std::size_t d = 0; d < depth_; ++d) {
      index_[d] = run_index % loops_[d].extent;
      run_index /= loops_[d].extent;
      for (std::size_t i = 0; i < N; ++i) at_[i] += index_[d] * loops_[d].stride[i];
    }
    TB_DCHECK(run_index == 0);
  }

  /// The next rows, at most `limit` (> 0) bytes of them: several whole runs, or a part of one.
  Rows Next(std::uint64_t limit) {
    Rows rows{.at = at_, .pitch = {}, .bytes = run_, .count = 1};
    if (within_ != 0 || limit < run_) {
      for (std::size_t i = 0; i < N; ++i) rows.at[i] += within_;
      rows.bytes = std::min(limit, run_ - within_);
      within_ += rows.bytes;
      if (within_ == run_) {
        within_ = 0;
        Advance(1);
      }
      return rows;
    }
    if (depth_ != 0) {
      rows.pitch = loops_[0].stride;
      rows.count = std::min(limit / run_, loops_[0].extent - index_[0]);
    }
    Advance(rows.count);
    return rows;
  }

 private:
  struct Loop {
    std::uint64_t extent = 1;
    Addresses stride = {};
  };

  /// Adds the next outer dimension: to the run, to the loop inside it, or as a loop of its own.
  void Append(const Loop& loop) {
    const auto lies_at = [&](auto inner_bytes) {
      for (std::size_t i = 0; i < N; ++i) {
        if (loop.stride[i] != inner_bytes(i)) return false;
      }
      return true;
    };
    if (depth_ == 0) {
      if (lies_at([&](std::size_t) { return run_; })) {
        run_ *= loop.extent;
        return;
      }
    } else {
      Loop& inner = loops_[depth_ - 1];
      if (lies_at([&](std::size_t i) { return inner.stride[i] * inner.extent; })) {
        inner.extent *= loop.extent;
        return;
      }
    }
    loops_[depth_++] = loop;
  }

  void Advance(std::uint64_t runs) {
    for (std::size_t d = 0; d < depth_; ++d) {
      index_[d] += runs;
      for (std::size_t i = 0; i < N; ++i) at_[i] += runs * loops_[d].stride[i];
      if (index_[d] < loops_[d].extent) return;
      for (std::size_t i = 0; i < N; ++i) at_[i] -= index_[d] * loops_[d].stride[i];
      index_[d] = 0;
      runs = 1;
    }
  }

  std::array<Loop, kMaxDims> loops_ = {};  // innermost first
  std::array<std::uint64_t, kMaxDims> index_ = {};
  Addresses at_;
  Addresses start_;
  std::uint64_t run_;
  std::uint64_t within_ = 0;
  std::size_t depth_ = 0;
};

inline std::uint64_t AddressOf(const StridedBlock& block) {
  return reinterpret_cast<std::uintptr_t>(block.base);
}
inline std::byte* PointerAt(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

/// The block's memory.
inline Walk<1> MemoryWalk(const StridedBlock& block) {
  return {block, {&block.strides}, {AddressOf(block)}};
}
/// The block's places in the tensor's stream.
inline Walk<1> StreamWalk(const StridedBlock& block) {
  return {block, {&block.stream_strides}, {block.stream_offset}};
}
/// Memory, and the stream beside it.
inline Walk<2> MemoryStreamWalk(const StridedBlock& block) {
  return {block, {&block.strides, &block.stream_strides}, {AddressOf(block), block.stream_offset}};
}

}  // namespace tensorbus::kernels
