#include "tensorbus/transport/foreign_landing.h"

#include <algorithm>
#include <array>
#include <vector>

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/joint_copy.h"
#include "tensorbus/kernels/walk.h"
#include "tensorbus/transport/route_check.h"

namespace tensorbus::transport {

namespace {

/// Most bytes that are read for a digest at a time: what stays in a core's cache.
constexpr std::uint64_t kDigestBatchBytes = std::uint64_t{1} << 20;

std::uint64_t BytesOf(std::span<const BlockPart> parts) {
  std::uint64_t bytes = 0;
  for (const BlockPart& part : parts) bytes += part.range.count;
  return bytes;
}

/// The parts as ForeignMemory takes them, each in the block that `block_of` gives.
template <typename BlockOf>
std::vector<ForeignPart> Addressed(std::span<const BlockPart> parts, const BlockOf& block_of) {
  std::vector<ForeignPart> out;
  out.reserve(parts.size());
  for (const BlockPart& part : parts) {
    out.push_back(
        {.block = &block_of(part.block), .first = part.range.first, .count = part.range.count});
  }
  return out;
}

/// Hands out parts in batches of bounded bytes, cutting those that do not fit.
class BatchCutter {
 public:
  explicit BatchCutter(std::span<const BlockPart> parts) : rest_(parts) {}

  bool done() const { return next_ == rest_.size(); }
  /// At most `bytes_max` (> 0) bytes.
  std::vector<BlockPart> Take(std::uint64_t bytes_max) {
    std::vector<BlockPart> batch;
    while (next_ < rest_.size() && bytes_max != 0) {
      const kernels::ByteRange& range = rest_[next_].range;
      const std::uint64_t count = std::min(bytes_max, range.count - cut_);
      batch.push_back(
          {.block = rest_[next_].block, .range = {.first = range.first + cut_, .count = count}});
      bytes_max -= count;
      cut_ += count;
      if (cut_ != range.count) continue;
      cut_ = 0;
      ++next_;
    }
    return batch;
  }

 private:
  std::span<const BlockPart> rest_;
  std::size_t next_ = 0;
  std::uint64_t cut_ = 0;  // bytes of the next part that were handed out
};

/// Sums of parts that lie packed one after the other; below kStream only their bytes.
std::vector<DigestSum> SumPacked(const RouteEnd& end, std::span<const BlockPart> parts,
                                 const std::byte* packed, Proof proof) {
  std::vector<DigestSum> sums;
  sums.reserve(parts.size());
  for (const BlockPart& part : parts) {
    sums.push_back(proof == Proof::kOff ? DigestSum{.bytes = part.range.count}
                                        : DigestPacked(end.blocks[part.block], part.range, packed));
    packed += part.range.count;
  }
  return sums;
}

/// An alias of one of `parts`, as a part of its own.
struct AliasPart {
  std::size_t part = 0;
  const StridedBlock* place = nullptr;
  const StridedBlock* check = nullptr;
};

std::vector<AliasPart> AliasesOf(const TargetEnd& target, std::span<const BlockPart> parts) {
  std::vector<AliasPart> out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (const RouteEnd::Alias& alias : target.aliases(parts[i].block)) {
      out.push_back({.part = i, .place = &alias.place, .check = &alias.check()});
    }
  }
  return out;
}

}  // namespace

StridedBlock PackedBlock(const StridedBlock& block, const std::byte* packed, std::uint64_t first) {
  StridedBlock dense = block;
  std::uint64_t stride = block.item_bytes;
  for (std::size_t d = block.rank; d-- > 0;) {
    dense.strides[d] = stride;
    stride *= block.extents[d];
  }
  dense.base = kernels::PointerAt(reinterpret_cast<std::uintptr_t>(packed) - first);
  return dense;
}

DigestSum DigestPacked(const StridedBlock& block, kernels::ByteRange range,
                       const std::byte* packed) {
  return kernels::DigestRange(PackedBlock(block, packed, range.first), range);
}

Result<std::vector<DigestSum>> DigestForeign(ForeignMemory& memory,
                                             std::span<const StridedBlock> blocks,
                                             TimePoint deadline) {
  std::vector<DigestSum> sums(blocks.size());
  std::vector<BlockPart> all;
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].bytes() == 0) continue;
    all.push_back({.block = i, .range = {.first = 0, .count = blocks[i].bytes()}});
  }
  if (all.empty()) return sums;
  TB_ASSIGN_OR_RETURN(const ForeignStage stage, memory.Borrow(deadline));
  const std::uint64_t batch_bytes = std::min<std::uint64_t>(stage.bytes.size(), kDigestBatchBytes);
  const auto block_of = [&](std::uint32_t i) -> const StridedBlock& { return blocks[i]; };
  BatchCutter cutter(all);
  while (!cutter.done()) {
    const std::vector<BlockPart> batch = cutter.Take(batch_bytes);
    const std::span<std::byte> bytes = stage.bytes.first(BytesOf(batch));
    TB_RETURN_IF_ERROR(memory.Read(Addressed(batch, block_of), bytes, deadline));
    const std::byte* packed = bytes.data();
    for (const BlockPart& part : batch) {
      sums[part.block] += DigestPacked(blocks[part.block], part.range, packed);
      packed += part.range.count;
    }
  }
  return sums;
}

Status ReadParts(const RouteEnd& end, std::span<const BlockPart> parts, std::span<std::byte> out,
                 TimePoint deadline) {
  TB_CHECK(BytesOf(parts) == out.size());
  if (end.memory != nullptr) {
    const auto block_of = [&](std::uint32_t i) -> const StridedBlock& { return end.blocks[i]; };
    return end.memory->Read(Addressed(parts, block_of), out, deadline);
  }
  for (const BlockPart& part : parts) {
    kernels::PackRange(end.blocks[part.block], part.range.first, out.first(part.range.count));
    out = out.subspan(part.range.count);
  }
  return {};
}

Status WritePacked(const TargetEnd& target, std::span<const BlockPart> parts,
                   std::span<const std::byte> packed, TimePoint deadline) {
  ForeignMemory& memory = *target.end().memory;
  const auto block_of = [&](std::uint32_t i) -> const StridedBlock& { return target.block(i); };
  TB_RETURN_IF_ERROR(memory.Write(Addressed(parts, block_of), packed, deadline));
  const std::vector<AliasPart> aliases = AliasesOf(target, parts);
  if (aliases.empty()) return {};
  std::vector<std::uint64_t> starts;
  std::uint64_t start = 0;
  for (const BlockPart& part : parts) {
    starts.push_back(start);
    start += part.range.count;
  }
  for (const AliasPart& alias : aliases) {
    const kernels::ByteRange& range = parts[alias.part].range;
    const ForeignPart place = {.block = alias.place, .first = range.first, .count = range.count};
    TB_RETURN_IF_ERROR(
        memory.Write({&place, 1}, packed.subspan(starts[alias.part], range.count), deadline));
  }
  return {};
}

Status LandWritten(const LandingContext& context, std::span<const BlockPart> parts,
                   std::span<const DigestSum> sent, std::span<std::byte> scratch,
                   const OnLanded& landed) {
  const TargetEnd& target = context.target;
  const std::vector<AliasPart> aliases = AliasesOf(target, parts);
  if (context.hook != nullptr) {
    for (const BlockPart& part : parts) {
      context.hook(context.key, part.block, target.block(part.block), part.range);
    }
    for (const AliasPart& alias : aliases) {
      const BlockPart& part = parts[alias.part];
      context.hook(context.key, part.block, *alias.place, part.range);
    }
  }
  std::vector<Landing> landings;
  for (const DigestSum& sum : sent) landings.push_back({.source = sum, .target = sum});
  if (ReadsBack(context.proof)) {
    ForeignMemory& memory = *target.end().memory;
    const auto check_of = [&](std::uint32_t i) -> const StridedBlock& { return target.check(i); };
    const std::span<std::byte> all = scratch.first(BytesOf(parts));
    TB_RETURN_IF_ERROR(memory.Read(Addressed(parts, check_of), all, context.deadline));
    const std::byte* packed = all.data();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      landings[i].target = DigestPacked(target.check(parts[i].block), parts[i].range, packed);
      landings[i].intact = landings[i].target == sent[i];
      packed += parts[i].range.count;
    }
    for (const AliasPart& alias : aliases) {
      const kernels::ByteRange& range = parts[alias.part].range;
      const ForeignPart place = {.block = alias.check, .first = range.first, .count = range.count};
      const std::span<std::byte> bytes = scratch.first(range.count);
      TB_RETURN_IF_ERROR(memory.Read({&place, 1}, bytes, context.deadline));
      const DigestSum sum = DigestPacked(*alias.check, range, bytes.data());
      landings[alias.part].intact = landings[alias.part].intact && sum == sent[alias.part];
    }
  }
  for (std::size_t i = 0; i < parts.size(); ++i) landed(parts[i].block, landings[i]);
  return {};
}

Status LandForeign(const LandingContext& context, const RouteEnd& source,
                   std::span<const BlockPart> parts, const OnLanded& landed) {
  ForeignMemory* const target_memory = context.target.end().memory.get();
  // One stage serves both sides: what was read is written from it and then read back into it.
  ForeignMemory* const lender = source.memory != nullptr ? source.memory.get() : target_memory;
  TB_CHECK(lender != nullptr);
  TB_ASSIGN_OR_RETURN(const ForeignStage stage, lender->Borrow(context.deadline));
  BatchCutter cutter(parts);
  while (!cutter.done()) {
    const std::vector<BlockPart> batch = cutter.Take(stage.bytes.size());
    const std::span<std::byte> bytes = stage.bytes.first(BytesOf(batch));
    TB_RETURN_IF_ERROR(ReadParts(source, batch, bytes, context.deadline));
    if (target_memory == nullptr) {
      const std::byte* packed = bytes.data();
      for (const BlockPart& part : batch) {
        const StridedBlock dense = PackedBlock(source.blocks[part.block], packed, part.range.first);
        landed(part.block, LandFromMemory(context.key, dense, context.target, part.block,
                                          part.range, context.proof, context.store, context.hook));
        packed += part.range.count;
      }
      continue;
    }
    const std::vector<DigestSum> sent = SumPacked(source, batch, bytes.data(), context.proof);
    TB_RETURN_IF_ERROR(WritePacked(context.target, batch, bytes, context.deadline));
    TB_RETURN_IF_ERROR(LandWritten(context, batch, sent, bytes, landed));
  }
  return {};
}

void LandParts(PullState& pull, const RouteEnd& source, std::span<const BlockPart> parts,
               kernels::StoreKind store, const LandingHook& hook) {
  const TargetEnd& target = pull.target();
  if (source.memory == nullptr && target.end().memory == nullptr) {
    for (const BlockPart& part : parts) {
      pull.Add(part.block, LandFromMemory(pull.key(), source.blocks[part.block], target, part.block,
                                          part.range, pull.options().proof, store, hook));
    }
    return;
  }
  const LandingContext context = {.key = pull.key(),
                                  .target = target,
                                  .proof = pull.options().proof,
                                  .deadline = pull.options().deadline,
                                  .store = store,
                                  .hook = hook};
  const Status landed = LandForeign(
      context, source, parts,
      [&pull](std::uint32_t block, const Landing& landing) { pull.Add(block, landing); });
  if (!landed.ok()) pull.Fail(landed.Annotate(RouteName(pull.key())));
}

void LandJointly(std::span<const JointPart> parts, kernels::StoreKind store,
                 const LandingHook& hook) {
  if (parts.size() < 2 || hook != nullptr) {
    for (const JointPart& part : parts) {
      LandParts(*part.pull, *part.source, std::span(&part.part, 1), store, hook);
    }
    return;
  }
  std::array<kernels::JointCopy, kernels::kJointMax> copies;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::uint32_t block = parts[i].part.block;
    const TargetEnd& target = parts[i].pull->target();
    copies[i] = {.source = &parts[i].source->blocks[block],
                 .target = &target.block(block),
                 .check = &target.check(block),
                 .range = parts[i].part.range,
                 .sums = {}};
  }
  const std::span<kernels::JointCopy> joint = std::span(copies).first(parts.size());
  const Proof proof = parts.front().pull->options().proof;
  if (ReadsBack(proof)) {
    kernels::CopyJointReadback(joint);
  } else if (proof == Proof::kOff) {
    kernels::CopyJoint(joint, store);
  } else {
    kernels::CopyJointDigest(joint, store);
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    Landing landing = {.source = copies[i].sums.source, .target = copies[i].sums.source};
    if (ReadsBack(proof)) landing.target = copies[i].sums.target;
    landing.intact = landing.source == landing.target;
    parts[i].pull->Add(parts[i].part.block, landing);
  }
}

}  // namespace tensorbus::transport
