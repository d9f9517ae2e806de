#include "tensorbus/kernels/copy.h"

#include "tensorbus/kernels/copy_walk.h"
#include "tensorbus/kernels/gather.h"

namespace tensorbus::kernels {

namespace {

/// Blocks whose runs are long enough to be copied and digested in place.
CopySums ReadbackDirect(const StridedBlock& source, const StridedBlock& check, CopyWalk copy,
                        Walk<2> back, ByteRange range) {
  const RunKernels& run = BestKernels();
  CopySums sums;
  copy.Seek(range.first);
  back.Seek(range.first);
  std::uint64_t bytes = GroupLength(range.count, copy.left_in_run(), copy.at(2));
  for (std::uint64_t left = range.count; left != 0;) {
    CopyGroup(run, sums.source, source.key, copy, bytes);
    left -= bytes;
    const std::byte* ahead = nullptr;
    std::uint64_t next = 0;
    if (left != 0) {
      next = GroupLength(left, copy.left_in_run(), copy.at(2));
      if (copy.left_in_run() >= bytes) {
        ahead = PointerAt(copy.at(0));
      } else {
        PrefetchGroup(copy, next);
      }
    }
    CheckGroup(run, sums.target, check.key, back, bytes, ahead);
    bytes = next;
  }
  return sums;
}

/// Blocks of short runs (transposes, interleaves): group by group through a packed buffer.
CopySums ReadbackPacked(const StridedBlock& source, const StridedBlock& target,
                        const StridedBlock& check, ByteRange range) {
  const RunKernels& run = BestKernels();
  Walk<1> from = MemoryWalk(source);
  Walk<1> from_stream = StreamWalk(source);
  Walk<1> to = MemoryWalk(target);
  Walk<1> back = MemoryWalk(check);
  Walk<1> back_stream = StreamWalk(check);
  for (Walk<1>* walk : {&from, &from_stream, &to, &back, &back_stream}) walk->Seek(range.first);
  CopySums sums;
  alignas(64) std::byte group[kGroupBytes];
  for (std::uint64_t left = range.count; left != 0;) {
    const std::uint64_t bytes = GroupLength(left, from_stream.left_in_run(), from_stream.at(0));
    Gather(from, group, bytes);
    DigestPacked(run, sums.source, source.key, group, from_stream, bytes);
    Scatter(group, bytes, to);
    Gather(back, group, bytes);
    DigestPacked(run, sums.target, check.key, group, back_stream, bytes);
    left -= bytes;
  }
  return sums;
}

}  // namespace

void CopyRange(const StridedBlock& source, const StridedBlock& target, ByteRange range,
               StoreKind store) {
  if (range.count == 0) return;
  const RunKernels& run = BestKernels();
  Walk<2> walk(source, {&source.strides, &target.strides}, {AddressOf(source), AddressOf(target)});
  const bool streams = Streams(store, range.count, walk.run_bytes());
  walk.Seek(range.first);
  for (std::uint64_t left = range.count; left != 0;) {
    const auto rows = walk.Next(left);
    left -= rows.bytes * rows.count;
    if (!streams) {
      CopyRows(PointerAt(rows.at[1]), rows.pitch[1], PointerAt(rows.at[0]), rows.pitch[0],
               rows.bytes, rows.count);
      continue;
    }
    for (std::uint64_t k = 0; k < rows.count; ++k) {
      run.stream(PointerAt(rows.at[1] + k * rows.pitch[1]),
                 PointerAt(rows.at[0] + k * rows.pitch[0]), static_cast<std::size_t>(rows.bytes));
    }
  }
  if (streams) run.fence();
}

DigestSum CopyRangeDigest(const StridedBlock& source, const StridedBlock& target, ByteRange range,
                          StoreKind store) {
  DigestSum sum;
  if (range.count == 0) return sum;
  const RunKernels& run = BestKernels();
  CopyWalk walk = MakeCopyWalk(source, target);
  if (walk.run_bytes() >= kDirectRunBytes) {
    const bool streams = Streams(store, range.count, walk.run_bytes());
    const auto copy = streams ? run.stream_digest : run.copy_digest;
    walk.Seek(range.first);
    for (std::uint64_t left = range.count; left != 0;) {
      const auto rows = walk.Next(left);
      for (std::uint64_t k = 0; k < rows.count; ++k) {
        copy(sum, source.key, PointerAt(rows.at[1] + k * rows.pitch[1]),
             PointerAt(rows.at[0] + k * rows.pitch[0]), rows.at[2] + k * rows.pitch[2],
             static_cast<std::size_t>(rows.bytes));
      }
      left -= rows.bytes * rows.count;
    }
    if (streams) run.fence();
    return sum;
  }
  Walk<1> from = MemoryWalk(source);
  Walk<1> stream = StreamWalk(source);
  Walk<1> to = MemoryWalk(target);
  for (Walk<1>* each : {&from, &stream, &to}) each->Seek(range.first);
  alignas(64) std::byte group[kGroupBytes];
  for (std::uint64_t left = range.count; left != 0;) {
    const std::uint64_t bytes = GroupLength(left, stream.left_in_run(), stream.at(0));
    Gather(from, group, bytes);
    DigestPacked(run, sum, source.key, group, stream, bytes);
    Scatter(group, bytes, to);
    left -= bytes;
  }
  return sum;
}

CopySums CopyRangeReadback(const StridedBlock& source, const StridedBlock& target,
                           const StridedBlock& check, ByteRange range) {
  if (range.count == 0) return {};
  const CopyWalk copy = MakeCopyWalk(source, target);
  const Walk<2> back = MemoryStreamWalk(check);
  if (copy.run_bytes() >= kDirectRunBytes && back.run_bytes() >= kDirectRunBytes) {
    return ReadbackDirect(source, check, copy, back, range);
  }
  return ReadbackPacked(source, target, check, range);
}

void CopyBlock(const StridedBlock& source, const StridedBlock& target) {
  CopyRange(source, target, {.first = 0, .count = source.bytes()});
}

DigestSum CopyBlockDigest(const StridedBlock& source, const StridedBlock& target) {
  return CopyRangeDigest(source, target, {.first = 0, .count = source.bytes()});
}

CopySums CopyBlockReadback(const StridedBlock& source, const StridedBlock& target) {
  return CopyRangeReadback(source, target, target, {.first = 0, .count = source.bytes()});
}

}  // namespace tensorbus::kernels
