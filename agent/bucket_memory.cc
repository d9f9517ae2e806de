#include "agent/bucket_memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fmt/format.h>

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/digest.h"

namespace tensorbus::agent {
namespace {

using transport::ForeignPart;

std::uint64_t BytesOf(std::span<const ForeignPart> parts) {
  std::uint64_t bytes = 0;
  for (const ForeignPart& part : parts) bytes += part.count;
  return bytes;
}

}  // namespace

Result<std::shared_ptr<BucketMemory>> BucketMemory::Create(
    std::shared_ptr<BucketChannel> channel, std::shared_ptr<const PieceIndex> pieces,
    std::vector<std::byte*> bases, std::shared_ptr<transport::StagingBudget> budget) {
  std::shared_ptr<BucketMemory> memory(
      new BucketMemory(std::move(channel), std::move(pieces), std::move(bases)));
  TB_RETURN_IF_ERROR(memory->MakeBuckets(*budget));
  return memory;
}

Status BucketMemory::MakeBuckets(transport::StagingBudget& budget) {
  std::uint64_t bytes = std::min(kBucketBytes, budget.limit_bytes() / 16);
  const std::uint64_t half = budget.limit_bytes() / 2;
  // Smaller buckets before none: they cost round trips, not correctness.
  while (bytes > kBucketBytesMin && budget.used_bytes() + kBuckets * bytes > half) bytes /= 2;
  bucket_bytes_ = std::max(bytes, kBucketBytesMin) & ~std::uint64_t{4095};
  const MutexLock lock(mutex_);
  for (std::uint32_t i = 0; i < kBuckets; ++i) {
    Result<transport::StagingBudget::Lease> lease = budget.TryAcquire(bucket_bytes_);
    if (!lease.ok()) {
      return lease.status().Annotate(
          fmt::format("buckets for the private memory of {}; start the agent with a larger "
                      "--staging-mib, or put the tensors into mapped memory",
                      channel_->owner()));
    }
    buckets_[i].lease = *std::move(lease);
    TB_RETURN_IF_ERROR(Renew(i));
  }
  return {};
}

BucketMemory::BucketMemory(std::shared_ptr<BucketChannel> channel,
                           std::shared_ptr<const PieceIndex> pieces, std::vector<std::byte*> bases)
    : channel_(std::move(channel)), pieces_(std::move(pieces)), bases_(std::move(bases)) {
  for (std::uint32_t i = 0; i < pieces_->registration().tensors.size(); ++i) {
    tensors_by_key_[pieces_->KeyOf(i).a].push_back(i);
  }
}

// A fresh object for the number: what an order that was given up still does, it does to the old
// one.
Status BucketMemory::Renew(std::uint32_t number) {
  TB_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd("tensorbus-bucket", bucket_bytes_));
  TB_ASSIGN_OR_RETURN(Mapping mapping,
                      Mapping::Create(fd.get(), bucket_bytes_, Mapping::Access::kReadWrite));
  TB_RETURN_IF_ERROR(TouchPages(mapping.span()));
  buckets_[number].memory = std::move(mapping);
  buckets_[number].spoilt = false;
  channel_->Attach({.bucket = number, .bytes = bucket_bytes_}, std::move(fd));
  return {};
}

Result<transport::ForeignStage> BucketMemory::Borrow(TimePoint deadline) {
  const MutexLock lock(mutex_);
  for (bool in_time = true;; in_time = returned_.WaitUntil(mutex_, deadline)) {
    for (std::uint32_t i = 0; i < kBuckets; ++i) {
      if (buckets_[i].lent) continue;
      if (buckets_[i].spoilt) TB_RETURN_IF_ERROR(Renew(i));
      buckets_[i].lent = true;
      return transport::ForeignStage(
          buckets_[i].memory.span(),
          std::shared_ptr<void>(nullptr,
                                [self = shared_from_this(), i](void*) { self->Return(i); }));
    }
    if (!in_time) {
      return Status(Code::kDeadlineExceeded,
                    fmt::format("the buckets of {} stayed in use: it packs and unpacks too slowly",
                                channel_->owner()),
                    Reason::kMissingRank);
    }
  }
}

void BucketMemory::Return(std::uint32_t number) {
  const MutexLock lock(mutex_);
  buckets_[number].lent = false;
  returned_.NotifyOne();
}

std::optional<BucketMemory::Place> BucketMemory::PlaceOf(std::span<const std::byte> span) {
  const MutexLock lock(mutex_);
  for (std::uint32_t i = 0; i < kBuckets; ++i) {
    const std::span<const std::byte> bucket = buckets_[i].memory.span();
    if (span.data() < bucket.data() || span.data() >= bucket.data() + bucket.size()) continue;
    return Place{.bucket = i, .offset = static_cast<std::uint64_t>(span.data() - bucket.data())};
  }
  return std::nullopt;
}

// A block says which tensor it is of (its key) and, by its place in the tensor's stream, which box.
// Of several pieces that hold the box its address tells the right one.
Result<wire::BucketRange> BucketMemory::RangeOf(const StridedBlock& block) const {
  const Registration& registration = pieces_->registration();
  const auto tensors = tensors_by_key_.find(block.key.a);
  const auto fits = [&](std::uint32_t tensor, wire::BucketRange& range) {
    const TensorSpec& spec = registration.tensors[tensor];
    if (pieces_->KeyOf(tensor) != block.key || spec.shape.rank() != block.rank) return false;
    std::array<Range, kMaxDims> ranges = {};
    std::uint64_t at = block.stream_offset / block.item_bytes;
    for (int d = block.rank - 1; d >= 0; --d) {
      const std::uint64_t lo = at % spec.shape[d];
      at /= spec.shape[d];
      ranges[static_cast<std::size_t>(d)] = {lo, lo + block.extents[static_cast<std::size_t>(d)]};
    }
    range.box = Box(std::span<const Range>(ranges.data(), block.rank));
    for (const std::uint32_t piece : pieces_->PiecesOf(tensor)) {
      if (!registration.pieces[piece].box.Contains(range.box)) continue;
      const PlacedBlock placed = pieces_->Place(piece, range.box);
      const StridedBlock there = placed.At(bases_);
      if (there.base != block.base || there.strides != block.strides) continue;
      range.piece = piece;
      return true;
    }
    return false;
  };
  if (tensors != tensors_by_key_.end()) {
    wire::BucketRange range;
    for (const std::uint32_t tensor : tensors->second) {
      if (fits(tensor, range)) return range;
    }
  }
  return Status(Code::kInternal,
                fmt::format("a block of {} that is in none of its pieces", channel_->owner()));
}

Status BucketMemory::Ask(wire::MessageType type, std::span<const ForeignPart> parts, Place place,
                         TimePoint deadline) {
  wire::BucketWork work;
  work.ranges.reserve(parts.size());
  const StridedBlock* last_block = nullptr;
  for (const ForeignPart& part : parts) {
    if (part.count == 0) continue;
    wire::BucketRange range;
    if (part.block == last_block) {
      range = work.ranges.back();
    } else {
      TB_ASSIGN_OR_RETURN(range, RangeOf(*part.block));
    }
    last_block = part.block;
    range.first = part.first;
    range.bytes = part.count;
    range.bucket = place.bucket;
    range.bucket_offset = place.offset;
    place.offset += part.count;
    work.ranges.push_back(range);
  }
  if (work.ranges.empty()) return {};
  const Status done = channel_->Ask(type, work, deadline);
  if (!done.ok()) {
    const MutexLock lock(mutex_);
    buckets_[place.bucket].spoilt = true;
  }
  return done;
}

template <typename Move>
Status BucketMemory::ThroughBucket(std::span<const ForeignPart> parts, TimePoint deadline,
                                   const Move& move) {
  TB_ASSIGN_OR_RETURN(const transport::ForeignStage stage, Borrow(deadline));
  std::vector<ForeignPart> batch;
  std::uint64_t batch_bytes = 0;
  std::uint64_t offset = 0;
  const auto flush = [&]() -> Status {
    if (batch.empty()) return {};
    TB_RETURN_IF_ERROR(move(batch, offset, stage.bytes.first(batch_bytes)));
    offset += batch_bytes;
    batch.clear();
    batch_bytes = 0;
    return {};
  };
  for (const ForeignPart& part : parts) {
    for (std::uint64_t done = 0; done < part.count;) {
      const std::uint64_t room = stage.bytes.size() - batch_bytes;
      const std::uint64_t count = std::min(room, part.count - done);
      batch.push_back({.block = part.block, .first = part.first + done, .count = count});
      batch_bytes += count;
      done += count;
      if (batch_bytes == stage.bytes.size()) TB_RETURN_IF_ERROR(flush());
    }
  }
  return flush();
}

Status BucketMemory::Read(std::span<const ForeignPart> parts, std::span<std::byte> out,
                          TimePoint deadline) {
  TB_CHECK(BytesOf(parts) == out.size());
  if (const auto place = PlaceOf(out); place.has_value()) {
    return Ask(wire::MessageType::kPack, parts, *place, deadline);
  }
  return ThroughBucket(
      parts, deadline,
      [&](std::span<const ForeignPart> batch, std::uint64_t offset,
          std::span<std::byte> bucket) -> Status {
        TB_RETURN_IF_ERROR(Ask(wire::MessageType::kPack, batch, *PlaceOf(bucket), deadline));
        std::memcpy(out.data() + offset, bucket.data(), bucket.size());
        return {};
      });
}

Status BucketMemory::Write(std::span<const ForeignPart> parts, std::span<const std::byte> in,
                           TimePoint deadline) {
  TB_CHECK(BytesOf(parts) == in.size());
  if (const auto place = PlaceOf(in); place.has_value()) {
    return Ask(wire::MessageType::kUnpack, parts, *place, deadline);
  }
  return ThroughBucket(parts, deadline,
                       [&](std::span<const ForeignPart> batch, std::uint64_t offset,
                           std::span<std::byte> bucket) -> Status {
                         std::memcpy(bucket.data(), in.data() + offset, bucket.size());
                         return Ask(wire::MessageType::kUnpack, batch, *PlaceOf(bucket), deadline);
                       });
}

Result<double> BucketMemory::MeasureSpeed(TimePoint deadline) {
  std::vector<StridedBlock> blocks;
  const std::size_t count = std::min<std::size_t>(pieces_->registration().pieces.size(), 1024);
  blocks.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(pieces_->Place(i).At(bases_));
  std::vector<ForeignPart> parts;
  std::uint64_t bytes = 0;
  for (const StridedBlock& block : blocks) {
    const std::uint64_t part = std::min(block.bytes(), bucket_bytes_ - bytes);
    if (part != 0) parts.push_back({.block = &block, .first = 0, .count = part});
    bytes += part;
  }
  if (parts.empty()) return 0.0;
  TB_ASSIGN_OR_RETURN(const transport::ForeignStage stage, Borrow(deadline));
  double best = 0;
  for (int round = 0; round < 2; ++round) {
    const TimePoint begin = std::chrono::steady_clock::now();
    TB_RETURN_IF_ERROR(Read(parts, stage.bytes.first(bytes), deadline));
    const double seconds = Seconds(std::chrono::steady_clock::now() - begin);
    if (seconds > 0) best = std::max(best, static_cast<double>(bytes) / seconds / 1e9);
  }
  return best;
}

}  // namespace tensorbus::agent
