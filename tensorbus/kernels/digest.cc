#include "tensorbus/kernels/digest.h"

#include "tensorbus/base/byte_io.h"
#include "tensorbus/base/hash.h"
#include "tensorbus/kernels/digest_table.h"
#include "tensorbus/kernels/digest_walk.h"
#include "tensorbus/kernels/gather.h"

namespace tensorbus::kernels {

DigestKey MakeDigestKey(std::string_view channel, std::string_view tensor, DType dtype) {
  ByteWriter writer;
  writer.PutString(channel);
  writer.PutString(tensor);
  writer.Put(dtype);
  const Hash128 hash = HashOf(writer.bytes());
  return {.a = hash.low, .b = hash.high};
}

void AddDigest(DigestSum& sum, const DigestKey& key, const std::byte* memory,
               std::uint64_t stream_offset, std::size_t count) {
  BestKernels().digest(sum, key, memory, stream_offset, count);
}

void AddDigestReference(DigestSum& sum, const DigestKey& key, const std::byte* memory,
                        std::uint64_t stream_offset, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t at = stream_offset + i;
    const std::uint64_t block = at / kDigestBlockBytes;
    const std::uint64_t word = at % kDigestBlockBytes / 4;
    const std::uint64_t value = (static_cast<std::uint64_t>(memory[i]) + 1) << (8 * (at % 4));
    sum.a += value * kDigestTable.keys[word] * DigestMultiplier(key.a, block);
    sum.b += value * kDigestTable.keys[word + kDigestKeyShift] * DigestMultiplier(key.b, block);
  }
  sum.bytes += count;
}

DigestSum DigestBlock(const StridedBlock& block) {
  return DigestRange(block, {.first = 0, .count = block.bytes()});
}

DigestSum DigestRange(const StridedBlock& block, ByteRange range) {
  DigestSum sum;
  if (range.count == 0) return sum;
  const RunKernels& run = BestKernels();
  if (Walk<2> both = MemoryStreamWalk(block); both.run_bytes() >= kDirectRunBytes) {
    both.Seek(range.first);
    DigestWalk(run, sum, block.key, both, range.count);
    return sum;
  }
  Walk<1> memory = MemoryWalk(block);
  Walk<1> stream = StreamWalk(block);
  memory.Seek(range.first);
  stream.Seek(range.first);
  alignas(64) std::byte group[kGroupBytes];
  for (std::uint64_t left = range.count; left != 0;) {
    const std::uint64_t bytes = GroupLength(left, stream.left_in_run(), stream.at(0));
    Gather(memory, group, bytes);
    DigestPacked(run, sum, block.key, group, stream, bytes);
    left -= bytes;
  }
  return sum;
}

}  // namespace tensorbus::kernels
