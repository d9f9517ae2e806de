#include "worker_shim/bucket_service.h"

#include <fmt/format.h>

#include "tensorbus/kernels/copy.h"

namespace tensorbus::worker_shim {
namespace {

Status Refused(std::string message) {
  return {Code::kInvalidArgument, "bucket order: " + std::move(message), Reason::kMalformed};
}

}  // namespace

void BucketService::SetMemory(const Registration& registration, std::vector<std::byte*> segments) {
  MutexLock lock(mutex_);
  registration_ = registration;
  segments_ = std::move(segments);
  buckets_.clear();
}

Status BucketService::Attach(const wire::AttachBucket& bucket, UniqueFd fd) {
  if (bucket.bucket >= kBucketsMax || bucket.bytes > kBucketBytesMax) {
    return Refused(fmt::format("bucket {} of {} bytes; at most {} of {} are allowed", bucket.bucket,
                               bucket.bytes, kBucketsMax, kBucketBytesMax));
  }
  TB_ASSIGN_OR_RETURN(Mapping mapping,
                      Mapping::Create(fd.get(), bucket.bytes, Mapping::Access::kReadWrite));
  MutexLock lock(mutex_);
  buckets_[bucket.bucket] = std::move(mapping);
  return {};
}

void BucketService::DropBuckets() {
  MutexLock lock(mutex_);
  buckets_.clear();
}

// The range's box as it lies in the piece; both were checked.
StridedBlock BucketService::BlockOf(const wire::BucketRange& range) const {
  const Piece& piece = registration_.pieces[range.piece];
  StridedBlock block;
  block.base = segments_[piece.segment] + piece.offset;
  block.rank = static_cast<std::uint8_t>(piece.box.rank());
  block.item_bytes = ItemBytes(registration_.tensors[piece.tensor].dtype);
  block.strides = piece.strides;
  for (int d = 0; d < piece.box.rank(); ++d) {
    const auto i = static_cast<std::size_t>(d);
    block.extents[i] = range.box[d].size();
    block.base += (range.box[d].lo - piece.box[d].lo) * piece.strides[i];
  }
  return block;
}

Status BucketService::Check(const wire::BucketWork& work) const {
  for (const wire::BucketRange& range : work.ranges) {
    if (range.piece >= registration_.pieces.size()) {
      return Refused(fmt::format("piece {} of {}", range.piece, registration_.pieces.size()));
    }
    const Box& whole = registration_.pieces[range.piece].box;
    if (range.box.rank() != whole.rank() || range.box.empty() || !whole.Contains(range.box)) {
      return Refused(fmt::format("box {} of piece {}, which is {}", range.box.ToString(),
                                 range.piece, whole.ToString()));
    }
    const std::uint64_t box_bytes = BlockOf(range).bytes();
    if (range.first > box_bytes || range.bytes > box_bytes - range.first) {
      return Refused(
          fmt::format("bytes {}+{} of a box of {}", range.first, range.bytes, box_bytes));
    }
    const auto bucket = buckets_.find(range.bucket);
    if (bucket == buckets_.end()) return Refused(fmt::format("no bucket {}", range.bucket));
    const std::uint64_t size = bucket->second.size();
    if (range.bucket_offset > size || range.bytes > size - range.bucket_offset) {
      return Refused(fmt::format("bytes {}+{} of bucket {}, which has {}", range.bucket_offset,
                                 range.bytes, range.bucket, size));
    }
  }
  return {};
}

Status BucketService::Pack(const wire::BucketWork& work) {
  MutexLock lock(mutex_);
  TB_RETURN_IF_ERROR(Check(work));
  for (const wire::BucketRange& range : work.ranges) {
    kernels::PackRange(BlockOf(range), range.first,
                       buckets_.at(range.bucket).span().subspan(range.bucket_offset, range.bytes));
  }
  return {};
}

Status BucketService::Unpack(const wire::BucketWork& work) {
  MutexLock lock(mutex_);
  TB_RETURN_IF_ERROR(Check(work));
  for (const wire::BucketRange& range : work.ranges) {
    kernels::UnpackRange(buckets_.at(range.bucket).span().subspan(range.bucket_offset, range.bytes),
                         range.first, BlockOf(range));
  }
  return {};
}

}  // namespace tensorbus::worker_shim
