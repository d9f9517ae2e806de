#include "agent/piece_work.h"

#include <algorithm>
#include <fmt/format.h>

#include "agent/registered_place.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/kernels/copy.h"
#include "tensorbus/kernels/digest.h"
#include "tensorbus/transport/foreign_landing.h"

namespace tensorbus::agent {
namespace {

constexpr std::uint64_t kPartBytes = 4U << 20;

/// One part of one block: the unit that threads share out.
struct Part {
  std::uint32_t block = 0;
  PlacedBlock place;
};

std::vector<Part> CutAll(std::span<const PlacedBlock> blocks) {
  std::vector<Part> parts;
  parts.reserve(blocks.size());
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    for (PlacedBlock& part : CutBlock(blocks[i], kPartBytes)) parts.push_back({i, part});
  }
  return parts;
}

/// Every piece as a copy addresses it.
std::vector<PlacedBlock> PlaceAll(const PieceIndex& pieces) {
  std::vector<PlacedBlock> blocks;
  blocks.reserve(pieces.registration().pieces.size());
  for (std::uint32_t i = 0; i < pieces.registration().pieces.size(); ++i) {
    blocks.push_back(pieces.Place(i));
  }
  return blocks;
}

/// Every piece as it is checked.
std::vector<PlacedBlock> RegisteredAll(const PieceIndex& pieces) {
  const Registration& registration = pieces.registration();
  std::vector<PlacedBlock> blocks;
  blocks.reserve(registration.pieces.size());
  for (std::uint32_t i = 0; i < registration.pieces.size(); ++i) {
    const Piece& piece = registration.pieces[i];
    blocks.push_back(RegisteredPlace(registration, i, piece.box, pieces.KeyOf(piece.tensor)));
  }
  return blocks;
}

/// Consecutive stretches of about equal bytes, a few per thread so that a slow one evens out.
std::vector<std::span<const Part>> Share(std::span<const Part> parts, std::uint32_t thread_count) {
  std::uint64_t total = 0;
  for (const Part& part : parts) total += part.place.block.bytes();
  const std::uint64_t share = std::max<std::uint64_t>(1U << 20, total / (thread_count * 4U) + 1);
  std::vector<std::span<const Part>> shares;
  std::size_t begin = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    bytes += parts[i].place.block.bytes();
    if (bytes < share && i + 1 < parts.size()) continue;
    shares.push_back(parts.subspan(begin, i + 1 - begin));
    begin = i + 1;
    bytes = 0;
  }
  return shares;
}

/// The parts in one memory, as the end of a route.
transport::RouteEnd EndOf(std::span<const Part> parts, const MemoryAccess& memory) {
  transport::RouteEnd end;
  end.blocks.reserve(parts.size());
  for (const Part& part : parts) end.blocks.push_back(part.place.At(memory.bases()));
  end.memory = memory.foreign();
  return end;
}

struct CopyJob {
  std::shared_ptr<const PieceIndex> pieces;
  std::shared_ptr<const MemoryAccess> source;
  std::shared_ptr<const MemoryAccess> target;
  std::vector<Part> parts;
  std::vector<Part> checks;  ///< where each part is read back
  TimePoint deadline;
  std::function<void(Status)> done;
  Mutex mutex;
  Status failure TB_GUARDED_BY(mutex);

  void Run(std::span<const Part> share) {
    if (!source->addressable() || !target->addressable()) return RunForeign(share);
    for (const Part& part : share) {
      const StridedBlock from = part.place.At(source->bases());
      const kernels::CopySums sums = kernels::CopyRangeReadback(
          from, part.place.At(target->bases()), CheckOf(part).place.At(target->bases()),
          {.first = 0, .count = from.bytes()});
      if (sums.source != sums.target) return Mismatch(part);
    }
  }
  void RunForeign(std::span<const Part> share) {
    const transport::RouteEnd from = EndOf(share, *source);
    transport::RouteEnd end = EndOf(share, *target);
    for (const Part& part : share) {
      end.readback.push_back(CheckOf(part).place.At(target->bases()));
    }
    const transport::TargetEnd to(std::move(end));
    std::vector<transport::BlockPart> all;
    for (std::uint32_t i = 0; i < share.size(); ++i) {
      all.push_back({.block = i, .range = {.first = 0, .count = from.blocks[i].bytes()}});
    }
    const transport::RouteKey no_route{};
    const transport::LandingHook no_hook;
    const Status landed = transport::LandForeign(
        {.key = no_route, .target = to, .deadline = deadline, .hook = no_hook}, from, all,
        [&](std::uint32_t block, const transport::Landing& landing) {
          if (!landing.intact) Mismatch(share[block]);
        });
    if (!landed.ok()) Fail(landed);
  }
  const Part& CheckOf(const Part& part) const {
    return checks[static_cast<std::size_t>(&part - parts.data())];
  }
  void Mismatch(const Part& part) {
    Fail(Status(
        Code::kDataLoss,
        fmt::format("{} reads back differently than it was written", pieces->NameOf(part.block)),
        Reason::kChecksumMismatch));
  }
  void Fail(Status why) {
    MutexLock lock(mutex);
    if (failure.ok()) failure = std::move(why);
  }
  Status Outcome() {
    MutexLock lock(mutex);
    return failure;
  }
};

struct DigestJob {
  std::shared_ptr<const MemoryAccess> memory;
  std::vector<Part> parts;
  TimePoint deadline;
  std::function<void(Result<std::vector<DigestSum>>)> done;
  Mutex mutex;
  Status failure TB_GUARDED_BY(mutex);
  std::vector<DigestSum> sums TB_GUARDED_BY(mutex);

  void Run(std::span<const Part> share) {
    if (!memory->addressable()) return RunForeign(share);
    for (const Part& part : share) {
      const DigestSum sum = kernels::DigestBlock(part.place.At(memory->bases()));
      MutexLock lock(mutex);
      sums[part.block] += sum;
    }
  }
  void RunForeign(std::span<const Part> share) {
    const transport::RouteEnd end = EndOf(share, *memory);
    const Result<std::vector<DigestSum>> read =
        transport::DigestForeign(*end.memory, end.blocks, deadline);
    MutexLock lock(mutex);
    if (!read.ok()) {
      if (failure.ok()) failure = read.status();
      return;
    }
    for (std::size_t i = 0; i < share.size(); ++i) sums[share[i].block] += (*read)[i];
  }
  Result<std::vector<DigestSum>> Take() {
    MutexLock lock(mutex);
    if (!failure.ok()) return failure;
    return std::move(sums);
  }
};

template <typename Job>
std::vector<WorkPool::Task> TasksOf(const std::shared_ptr<Job>& job, std::uint32_t thread_count) {
  std::vector<WorkPool::Task> tasks;
  for (const std::span<const Part> share : Share(job->parts, thread_count)) {
    tasks.push_back([job, share] { job->Run(share); });
  }
  return tasks;
}

void StartDigests(const PieceWork& work, std::span<const PlacedBlock> blocks,
                  std::shared_ptr<const MemoryAccess> memory,
                  std::function<void(Result<std::vector<DigestSum>>)> done) {
  auto job = std::make_shared<DigestJob>();
  job->memory = std::move(memory);
  job->parts = CutAll(blocks);
  job->deadline = work.deadline;
  job->done = std::move(done);
  {
    MutexLock lock(job->mutex);
    job->sums.resize(blocks.size());
  }
  work.pool.SubmitAll(TasksOf(job, work.pool.thread_count()), work.executor,
                      [job] { job->done(job->Take()); });
}

}  // namespace

std::vector<PlacedBlock> CutBlock(const PlacedBlock& placed, std::uint64_t part_bytes) {
  const StridedBlock& block = placed.block;
  std::size_t dim = 0;
  while (dim < block.rank && block.extents[dim] == 1) ++dim;
  if (dim == block.rank || block.bytes() <= part_bytes) return {placed};
  const std::uint64_t rows = block.extents[dim];
  const std::uint64_t row_bytes = block.bytes() / rows;
  const std::uint64_t step = std::max<std::uint64_t>(1, part_bytes / row_bytes);
  std::vector<PlacedBlock> parts;
  for (std::uint64_t row = 0; row < rows; row += step) {
    PlacedBlock part = placed;
    part.block.extents[dim] = std::min(step, rows - row);
    part.offset += row * block.strides[dim];
    part.block.stream_offset += row * block.stream_strides[dim];
    parts.push_back(part);
  }
  return parts;
}

void CopyPieces(const PieceWork& work, std::shared_ptr<const PieceIndex> pieces,
                std::shared_ptr<const MemoryAccess> source,
                std::shared_ptr<const MemoryAccess> target, std::function<void(Status)> done) {
  auto job = std::make_shared<CopyJob>();
  job->parts = CutAll(PlaceAll(*pieces));
  job->checks = CutAll(RegisteredAll(*pieces));
  job->pieces = std::move(pieces);
  job->source = std::move(source);
  job->target = std::move(target);
  job->deadline = work.deadline;
  job->done = std::move(done);
  work.pool.SubmitAll(TasksOf(job, work.pool.thread_count()), work.executor,
                      [job] { job->done(job->Outcome()); });
}

void DigestPieces(const PieceWork& work, std::shared_ptr<const PieceIndex> pieces,
                  std::shared_ptr<const MemoryAccess> memory,
                  std::function<void(Result<std::vector<DigestSum>>)> done) {
  StartDigests(work, RegisteredAll(*pieces), std::move(memory), std::move(done));
}

void DigestBlocks(const PieceWork& work, std::shared_ptr<const std::vector<PlacedBlock>> blocks,
                  std::shared_ptr<const MemoryAccess> memory,
                  std::function<void(Result<std::vector<DigestSum>>)> done) {
  StartDigests(work, *blocks, std::move(memory), std::move(done));
}

}  // namespace tensorbus::agent
