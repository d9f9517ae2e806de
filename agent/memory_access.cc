#include "agent/memory_access.h"

#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <utility>

#include "agent/private_memory.h"

namespace tensorbus::agent {
namespace {

class MappedMemory final : public MemoryAccess {
 public:
  MappedMemory(std::vector<Mapping> segments, std::string why)
      : segments_(std::move(segments)), why_(std::move(why)) {
    for (const Mapping& segment : segments_) {
      bases_.push_back(segment.data());
      bytes_.push_back(segment.size());
    }
  }

  MemoryMode mode() const override { return MemoryMode::kMapped; }
  const std::string& why() const override { return why_; }
  std::span<std::byte* const> bases() const override { return bases_; }
  std::span<const std::uint64_t> segment_bytes() const override { return bytes_; }

 private:
  std::vector<Mapping> segments_;
  std::string why_;
  std::vector<std::byte*> bases_;
  std::vector<std::uint64_t> bytes_;
};

Status CheckCannotShrink(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0) return {};
  if (seals >= 0 && ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0) return {};
  return {Code::kFailedPrecondition,
          "shared memory that its owner can still cut short: pass a memfd that allows sealing",
          Reason::kUnsupported, errno};
}

}  // namespace

Result<Mapping> MapForeign(int fd, std::uint64_t bytes, Mapping::Access access) {
  TB_RETURN_IF_ERROR(CheckCannotShrink(fd));
  return Mapping::Create(fd, bytes, access);
}

Result<std::shared_ptr<const MemoryAccess>> CreateTwin(
    std::string_view name, std::span<const std::uint64_t> segment_bytes) {
  std::vector<Mapping> segments;
  for (const std::uint64_t bytes : segment_bytes) {
    TB_ASSIGN_OR_RETURN(const UniqueFd fd, CreateMemfd(name, bytes));
    TB_ASSIGN_OR_RETURN(Mapping mapping,
                        Mapping::Create(fd.get(), bytes, Mapping::Access::kReadWrite));
    segments.push_back(std::move(mapping));
  }
  return std::shared_ptr<const MemoryAccess>(
      std::make_shared<MappedMemory>(std::move(segments), std::string(name)));
}

Status SegmentCollector::Add(SegmentOffer offer) {
  const wire::AttachSegment& attach = offer.attach;
  if (segments_.size() >= wire::kMaxSegments) {
    return {
        Code::kResourceExhausted,
        fmt::format("more than {} segments; put the tensors into one arena", wire::kMaxSegments),
        Reason::kBusy};
  }
  if (attach.segment != segments_.size()) {
    return {Code::kInvalidArgument,
            fmt::format("segment {} came, {} was next", attach.segment, segments_.size()),
            Reason::kMalformed};
  }
  if (!attach.mapped) {
    if (attach.address == 0 || attach.bytes > ~attach.address) {
      return {Code::kInvalidArgument,
              fmt::format("segment {} is private memory of {} bytes at {:#x}, where none can be",
                          attach.segment, attach.bytes, attach.address),
              Reason::kMalformed};
    }
    any_private_ = true;
    segments_.push_back({.address = attach.address, .bytes = attach.bytes, .mapping = {}});
    return {};
  }
  if (!offer.fd.valid()) {
    return {Code::kInvalidArgument,
            fmt::format("segment {} came without a descriptor", attach.segment),
            Reason::kMalformed};
  }
  Result<Mapping> mapping = MapForeign(offer.fd.get(), attach.bytes, access_);
  if (!mapping.ok()) {
    return mapping.status().Annotate(fmt::format("segment {}", attach.segment));
  }
  segments_.push_back(
      {.address = attach.address, .bytes = attach.bytes, .mapping = *std::move(mapping)});
  return {};
}

std::shared_ptr<const MemoryAccess> SegmentCollector::Finish() {
  if (std::exchange(any_private_, false)) {
    std::vector<PrivateSegment> announced;
    for (const Segment& segment : segments_) {
      announced.push_back({.address = segment.address, .bytes = segment.bytes});
    }
    segments_.clear();
    return AnnouncedMemory(std::move(announced));
  }
  std::vector<Mapping> mappings;
  for (Segment& segment : segments_) mappings.push_back(std::move(segment.mapping));
  segments_.clear();
  return std::make_shared<MappedMemory>(std::move(mappings), "all segments are shared memory");
}

}  // namespace tensorbus::agent
