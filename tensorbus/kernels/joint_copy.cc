#include "tensorbus/kernels/joint_copy.h"

#include <algorithm>
#include <array>
#include <optional>

#include "tensorbus/base/check.h"
#include "tensorbus/kernels/copy_walk.h"

namespace tensorbus::kernels {
namespace {

/// Runs of at least so many bytes are groups of their own: the pass then never leaves the source's
/// order. Shorter ones are taken several at a time, or the change from copy to copy costs more.
constexpr std::uint64_t kOwnGroupRunBytes = 512;

/// Where one copy has got to.
struct Lane {
  Lane(JointCopy& joint, CopyWalk copy_walk, Walk<2> back_walk)
      : copy(&joint), walk(copy_walk), back(back_walk), left(joint.range.count) {
    walk.Seek(joint.range.first);
    back.Seek(joint.range.first);
  }

  std::uint64_t at() const { return walk.at(0); }
  std::uint64_t GroupBytes() const {
    const std::uint64_t bytes = GroupLength(left, walk.left_in_run(), walk.at(2));
    if (walk.run_bytes() < kOwnGroupRunBytes) return bytes;
    return std::min(bytes, walk.left_in_run());
  }

  JointCopy* copy;
  CopyWalk walk;
  Walk<2> back;
  std::uint64_t left;
};

/// The copies that are under way, at most kJointMax.
class Lanes {
 public:
  void Add(JointCopy& copy, CopyWalk walk, Walk<2> back) {
    lanes_[count_++].emplace(copy, walk, back);
  }
  /// The lane whose source comes first; null when all are done.
  Lane* First() {
    Lane* first = nullptr;
    for (std::size_t i = 0; i < count_; ++i) {
      Lane& lane = *lanes_[i];
      if (lane.left != 0 && (first == nullptr || lane.at() < first->at())) first = &lane;
    }
    return first;
  }

 private:
  std::array<std::optional<Lane>, kJointMax> lanes_;
  std::size_t count_ = 0;
};

/// Makes the copies that have to be packed on the way at once, by `alone`, and leaves the others.
template <typename Alone>
Lanes Collect(std::span<JointCopy> copies, const Alone& alone) {
  TB_CHECK(copies.size() <= kJointMax);
  Lanes lanes;
  for (JointCopy& copy : copies) {
    copy.sums = {};
    if (copy.range.count == 0) continue;
    const CopyWalk walk = MakeCopyWalk(*copy.source, *copy.target);
    const Walk<2> back = MemoryStreamWalk(*copy.check);
    if (walk.run_bytes() < kDirectRunBytes || back.run_bytes() < kDirectRunBytes) {
      alone(copy);
    } else {
      lanes.Add(copy, walk, back);
    }
  }
  return lanes;
}

std::uint64_t TotalBytes(std::span<const JointCopy> copies) {
  std::uint64_t bytes = 0;
  for (const JointCopy& copy : copies) bytes += copy.range.count;
  return bytes;
}

/// What the pass reads next, to be fetched while the target of `bytes` bytes is read back; null
/// when it is not in one run of as many bytes, or was read just now.
const std::byte* AheadOf(const Lane* next, std::uint64_t read_at, std::uint64_t bytes) {
  if (next == nullptr || next->at() == read_at || next->walk.left_in_run() < bytes) return nullptr;
  return PointerAt(next->at());
}

}  // namespace

void CopyJoint(std::span<JointCopy> copies, StoreKind store) {
  const RunKernels& run = BestKernels();
  const std::uint64_t total = TotalBytes(copies);
  Lanes lanes = Collect(copies, [&](JointCopy& copy) {
    CopyRange(*copy.source, *copy.target, copy.range, store);
    copy.sums.source.bytes = copy.range.count;
  });
  bool streamed = false;
  while (Lane* const lane = lanes.First()) {
    const bool streams = Streams(store, total, lane->walk.run_bytes());
    const auto copy = streams ? run.stream : run.copy;
    streamed = streamed || streams;
    const std::uint64_t bytes = lane->GroupBytes();
    for (std::uint64_t left = bytes; left != 0;) {
      const auto rows = lane->walk.Next(left);
      left -= rows.bytes * rows.count;
      for (std::uint64_t k = 0; k < rows.count; ++k) {
        copy(PointerAt(rows.at[1] + k * rows.pitch[1]), PointerAt(rows.at[0] + k * rows.pitch[0]),
             static_cast<std::size_t>(rows.bytes));
      }
    }
    lane->left -= bytes;
    lane->copy->sums.source.bytes += bytes;
  }
  if (streamed) run.fence();
}

void CopyJointDigest(std::span<JointCopy> copies, StoreKind store) {
  const RunKernels& run = BestKernels();
  const std::uint64_t total = TotalBytes(copies);
  Lanes lanes = Collect(copies, [&](JointCopy& copy) {
    copy.sums.source = CopyRangeDigest(*copy.source, *copy.target, copy.range, store);
  });
  bool streamed = false;
  while (Lane* const lane = lanes.First()) {
    const std::uint64_t bytes = lane->GroupBytes();
    DigestSum& sum = lane->copy->sums.source;
    const DigestKey& key = lane->copy->source->key;
    lane->left -= bytes;
    if (!Streams(store, total, lane->walk.run_bytes())) {
      CopyGroup(run, sum, key, lane->walk, bytes);
      continue;
    }
    streamed = true;
    for (std::uint64_t left = bytes; left != 0;) {
      const auto rows = lane->walk.Next(left);
      left -= rows.bytes * rows.count;
      for (std::uint64_t k = 0; k < rows.count; ++k) {
        run.stream_digest(sum, key, PointerAt(rows.at[1] + k * rows.pitch[1]),
                          PointerAt(rows.at[0] + k * rows.pitch[0]), rows.at[2] + k * rows.pitch[2],
                          static_cast<std::size_t>(rows.bytes));
      }
    }
  }
  if (streamed) run.fence();
}

void CopyJointReadback(std::span<JointCopy> copies) {
  const RunKernels& run = BestKernels();
  Lanes lanes = Collect(copies, [](JointCopy& copy) {
    copy.sums = CopyRangeReadback(*copy.source, *copy.target, *copy.check, copy.range);
  });
  Lane* lane = lanes.First();
  while (lane != nullptr) {
    const std::uint64_t bytes = lane->GroupBytes();
    const std::uint64_t read_at = lane->at();
    CopyGroup(run, lane->copy->sums.source, lane->copy->source->key, lane->walk, bytes);
    lane->left -= bytes;
    Lane* const next = lanes.First();
    const std::byte* const ahead = AheadOf(next, read_at, bytes);
    if (ahead == nullptr && next != nullptr && next->at() != read_at) {
      PrefetchGroup(next->walk, next->GroupBytes());
    }
    CheckGroup(run, lane->copy->sums.target, lane->copy->check->key, lane->back, bytes, ahead);
    lane = next;
  }
}

}  // namespace tensorbus::kernels
