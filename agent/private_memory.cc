#include "agent/private_memory.h"

#include <chrono>
#include <fmt/format.h>

#include "agent/bucket_memory.h"
#include "tensorbus/base/log.h"
#include "tensorbus/kernels/walk.h"

namespace tensorbus::agent {
namespace {

/// How long a worker that waits for its registration may take to pack for the first time.
constexpr Nanos kFirstPackPatience = std::chrono::seconds(5);

/// Private memory, before and after a way to it was found.
class PrivateMemory final : public MemoryAccess {
 public:
  struct Way {
    MemoryMode mode = MemoryMode::kBucket;
    std::string why;
    double gb_per_s = 0;
    std::shared_ptr<transport::ForeignMemory> memory;
  };

  PrivateMemory(std::span<std::byte* const> bases, std::span<const std::uint64_t> bytes, Way way)
      : bases_(bases.begin(), bases.end()),
        bytes_(bytes.begin(), bytes.end()),
        way_(std::move(way)) {}

  MemoryMode mode() const override { return way_.mode; }
  const std::string& why() const override { return way_.why; }
  std::span<std::byte* const> bases() const override { return bases_; }
  std::span<const std::uint64_t> segment_bytes() const override { return bytes_; }
  bool addressable() const override { return false; }
  std::shared_ptr<transport::ForeignMemory> foreign() const override { return way_.memory; }
  double expected_gb_per_s() const override { return way_.gb_per_s; }

 private:
  std::vector<std::byte*> bases_;
  std::vector<std::uint64_t> bytes_;
  Way way_;
};

Result<PrivateMemory::Way> OpenCma(const PrivateMemoryPlant& plant, const PrivateOwner& owner,
                                   const MemoryAccess& announced) {
  std::vector<PrivateSegment> segments;
  for (std::size_t i = 0; i < announced.bases().size(); ++i) {
    segments.push_back({.address = reinterpret_cast<std::uintptr_t>(announced.bases()[i]),
                        .bytes = announced.segment_bytes()[i]});
  }
  TB_ASSIGN_OR_RETURN(ProcessHandle process,
                      ProcessHandle::Open(owner.peer.pid, owner.peer.uid, owner.name));
  TB_ASSIGN_OR_RETURN(
      const std::shared_ptr<CmaMemory> memory,
      CmaMemory::Create(std::move(process), segments, owner.writable, plant.stages));
  PrivateMemory::Way way;
  way.mode = MemoryMode::kCma;
  way.gb_per_s = memory->MeasureSpeed(segments);
  way.why = fmt::format(
      "its tensors are private memory, which the agent {} in place (process_vm_{}v); mapped "
      "memory (an arena) is faster",
      owner.writable ? "reads and writes" : "reads", owner.writable ? "readv/write" : "read");
  way.memory = memory;
  return way;
}

Result<PrivateMemory::Way> OpenBuckets(const PrivateMemoryPlant& plant, const PrivateOwner& owner,
                                       const MemoryAccess& announced,
                                       std::shared_ptr<const PieceIndex> pieces,
                                       const std::string& why_not_cma) {
  const std::vector<std::byte*> bases(announced.bases().begin(), announced.bases().end());
  TB_ASSIGN_OR_RETURN(const std::shared_ptr<BucketMemory> memory,
                      BucketMemory::Create(owner.channel, std::move(pieces), bases, plant.budget));
  PrivateMemory::Way way;
  way.mode = MemoryMode::kBucket;
  TB_ASSIGN_OR_RETURN(way.gb_per_s,
                      memory->MeasureSpeed(std::chrono::steady_clock::now() + kFirstPackPatience));
  way.why = fmt::format(
      "its tensors are private memory, which the worker packs and unpacks itself while it waits, "
      "polls or has its service thread ({}); mapped memory (an arena) is faster and needs nothing "
      "of the worker",
      why_not_cma);
  way.memory = memory;
  return way;
}

Result<PrivateMemory::Way> FindWay(const PrivateMemoryPlant& plant, const PrivateOwner& owner,
                                   const MemoryAccess& announced,
                                   std::shared_ptr<const PieceIndex> pieces) {
  switch (static_cast<MemoryMode>(owner.wanted_mode)) {
    case MemoryMode::kCma: {
      Result<PrivateMemory::Way> way = OpenCma(plant, owner, announced);
      if (way.ok() || way.status().reason() != Reason::kUnsupported) return way;
      return Status(Code::kFailedPrecondition,
                    "cma was asked for and does not work: " + way.status().message(),
                    Reason::kUnsupported, way.status().native());
    }
    case MemoryMode::kBucket:
      return OpenBuckets(plant, owner, announced, std::move(pieces), "it asked for bucket mode");
    case MemoryMode::kMapped:
      return Status(Code::kInvalidArgument,
                    "private memory cannot be mapped; attach it with its descriptor, or ask for "
                    "cma or bucket",
                    Reason::kUnsupported);
    default:
      break;
  }
  Result<PrivateMemory::Way> way = OpenCma(plant, owner, announced);
  // Memory that is not there, or an owner that is gone, is nothing that buckets would mend.
  if (way.ok() || way.status().scope() > Scope::kRequest ||
      way.status().reason() == Reason::kMovedMemory ||
      way.status().reason() == Reason::kMalformed) {
    return way;
  }
  return OpenBuckets(plant, owner, announced, std::move(pieces), way.status().message());
}

}  // namespace

std::shared_ptr<const MemoryAccess> AnnouncedMemory(std::vector<PrivateSegment> segments) {
  std::vector<std::byte*> bases;
  std::vector<std::uint64_t> bytes;
  for (const PrivateSegment& segment : segments) {
    bases.push_back(kernels::PointerAt(segment.address));
    bytes.push_back(segment.bytes);
  }
  return std::make_shared<PrivateMemory>(
      bases, bytes, PrivateMemory::Way{.why = "announced as private memory", .memory = nullptr});
}

Result<std::shared_ptr<const MemoryAccess>> OpenPrivateMemory(
    const PrivateMemoryPlant& plant, const PrivateOwner& owner, const MemoryAccess& announced,
    std::shared_ptr<const PieceIndex> pieces) {
  TB_ASSIGN_OR_RETURN(PrivateMemory::Way way, FindWay(plant, owner, announced, std::move(pieces)));
  const std::string_view name = way.mode == MemoryMode::kCma ? "cma" : "bucket";
  Log(LogLevel::kWarn, "memory_mode_slow",
      {{"rank", owner.name},
       {"mode", name},
       {"gb_per_s", fmt::format("{:.1f}", way.gb_per_s)},
       {"why", way.why}});
  return std::shared_ptr<const MemoryAccess>(std::make_shared<PrivateMemory>(
      announced.bases(), announced.segment_bytes(), std::move(way)));
}

}  // namespace tensorbus::agent
