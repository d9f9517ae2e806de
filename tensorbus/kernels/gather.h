#pragma once

#include <cstddef>
#include <cstdint>

#include "tensorbus/kernels/walk.h"

namespace tensorbus::kernels {

/// Copies `count` runs of `bytes` bytes, run k from `source + k * source_pitch` to
/// `target + k * target_pitch`. Made for runs of a few bytes; long ones are cheap too.
void CopyRows(std::byte* target, std::uint64_t target_pitch, const std::byte* source,
              std::uint64_t source_pitch, std::uint64_t bytes, std::uint64_t count);

/// Moves the next `bytes` bytes of `walk` one after the other into `out`.
void Gather(Walk<1>& walk, std::byte* out, std::uint64_t bytes);
/// The inverse.
void Scatter(const std::byte* in, std::uint64_t bytes, Walk<1>& walk);

}  // namespace tensorbus::kernels
