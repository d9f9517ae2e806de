#include "tensorbus/kernels/gather.h"

#include <cstring>

#include "tensorbus/kernels/copy.h"
#include "tensorbus/kernels/run_kernels.h"

namespace tensorbus::kernels {

namespace {

/// memcpy of a size the compiler knows: one load and one store per run.
template <std::size_t kBytes>
void CopyFixedRows(std::byte* target, std::uint64_t target_pitch, const std::byte* source,
                   std::uint64_t source_pitch, std::uint64_t count) {
  for (std::uint64_t k = 0; k < count; ++k) {
    std::memcpy(target + k * target_pitch, source + k * source_pitch, kBytes);
  }
}

}  // namespace

void CopyRows(std::byte* target, std::uint64_t target_pitch, const std::byte* source,
              std::uint64_t source_pitch, std::uint64_t bytes, std::uint64_t count) {
  switch (bytes) {
    case 1:
      return CopyFixedRows<1>(target, target_pitch, source, source_pitch, count);
    case 2:
      return CopyFixedRows<2>(target, target_pitch, source, source_pitch, count);
    case 4:
      return CopyFixedRows<4>(target, target_pitch, source, source_pitch, count);
    case 8:
      return CopyFixedRows<8>(target, target_pitch, source, source_pitch, count);
    case 16:
      return CopyFixedRows<16>(target, target_pitch, source, source_pitch, count);
    case 32:
      return CopyFixedRows<32>(target, target_pitch, source, source_pitch, count);
    default:
      break;
  }
  const RunKernels& run = BestKernels();
  for (std::uint64_t k = 0; k < count; ++k) {
    run.copy(target + k * target_pitch, source + k * source_pitch, static_cast<std::size_t>(bytes));
  }
}

void Gather(Walk<1>& walk, std::byte* out, std::uint64_t bytes) {
  while (bytes != 0) {
    const auto rows = walk.Next(bytes);
    CopyRows(out, rows.bytes, PointerAt(rows.at[0]), rows.pitch[0], rows.bytes, rows.count);
    out += rows.bytes * rows.count;
    bytes -= rows.bytes * rows.count;
  }
}

void Scatter(const std::byte* in, std::uint64_t bytes, Walk<1>& walk) {
  while (bytes != 0) {
    const auto rows = walk.Next(bytes);
    CopyRows(PointerAt(rows.at[0]), rows.pitch[0], in, rows.bytes, rows.bytes, rows.count);
    in += rows.bytes * rows.count;
    bytes -= rows.bytes * rows.count;
  }
}

void PackRange(const StridedBlock& block, std::uint64_t first, std::span<std::byte> out) {
  if (out.empty()) return;
  Walk<1> walk = MemoryWalk(block);
  walk.Seek(first);
  Gather(walk, out.data(), out.size());
}

void UnpackRange(std::span<const std::byte> in, std::uint64_t first, const StridedBlock& block) {
  if (in.empty()) return;
  Walk<1> walk = MemoryWalk(block);
  walk.Seek(first);
  Scatter(in.data(), in.size(), walk);
}

std::uint64_t RunBytes(const StridedBlock& block) {
  return block.elements() == 0 ? 0 : MemoryWalk(block).run_bytes();
}

std::uint64_t RunBytes(const StridedBlock& source, const StridedBlock& target) {
  if (source.elements() == 0) return 0;
  return Walk<2>(source, {&source.strides, &target.strides},
                 {AddressOf(source), AddressOf(target)})
      .run_bytes();
}

}  // namespace tensorbus::kernels
