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

StridedBlock BucketService::BlockOf(std::uint32_t piece_index) const {
  const Piece& piece = registration_.pieces[piece_index];
  StridedBlock block;
  block.base = segments_[piece.segment] + piece.offset;
  block.rank = static_cast<std::uint8_t>(piece.box.rank());
  block.item_bytes = ItemBytes(registration_.tensors[piece.tensor].dtype);
  for (int d = 0; d < piece.box.rank(); ++d) {
    block.extents[static_cast<std::size_t>(d)] = piece.box[d].size();
  }
  block.strides = piece.strides;
  return block;
}

Status BucketService::Check(const wire::BucketWork& work) const {
  for (const wire::BucketRange& range : work.ranges) {
    if (range.piece >= registration_.pieces.size()) {
      return Refused(fmt::format("piece {} of {}", range.piece, registration_.pieces.size()));
    }
    const std::uint64_t piece_bytes = BlockOf(range.piece).bytes();
    if (range.first > piece_bytes || range.bytes > piece_bytes - range.first) {
      return Refused(fmt::format("bytes {}+{} of piece {}, which has {}", range.first, range.bytes,
                                 range.piece, piece_bytes));
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
    kernels::PackRange(BlockOf(range.piece), range.first,
                       buckets_.at(range.bucket).span().subspan(range.bucket_offset, range.bytes));
  }
  return {};
}

Status BucketService::Unpack(const wire::BucketWork& work) {
  MutexLock lock(mutex_);
  TB_RETURN_IF_ERROR(Check(work));
  for (const wire::BucketRange& range : work.ranges) {
    kernels::UnpackRange(buckets_.at(range.bucket).span().subspan(range.bucket_offset, range.bytes),
                         range.first, BlockOf(range.piece));
  }
  return {};
}

}  // namespace tensorbus::worker_shim
