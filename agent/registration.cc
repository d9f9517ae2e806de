#include "agent/registration.h"

#include <cerrno>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "agent/memory_left.h"
#include "planner/certificate.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/base/mapping.h"

namespace tensorbus::agent {
namespace {

Status CheckSegments(const Registration& registration, const MemoryAccess& memory) {
  const std::span<const std::uint64_t> attached = memory.segment_bytes();
  if (registration.segment_bytes.size() != attached.size()) {
    return {Code::kInvalidArgument,
            fmt::format("{} segments are registered, {} were attached",
                        registration.segment_bytes.size(), attached.size()),
            Reason::kMalformed};
  }
  for (std::size_t i = 0; i < attached.size(); ++i) {
    if (registration.segment_bytes[i] == attached[i]) continue;
    return {Code::kInvalidArgument,
            fmt::format("segment {} is registered with {} bytes, {} were attached", i,
                        registration.segment_bytes[i], attached[i]),
            Reason::kMalformed};
  }
  return {};
}

/// First and last byte that pieces use of each segment: gaps beyond them need no pages.
std::vector<std::span<std::byte>> UsedParts(const Registration& registration,
                                            const MemoryAccess& memory) {
  std::vector<std::uint64_t> begin(registration.segment_bytes.size(), ~std::uint64_t{0});
  std::vector<std::uint64_t> end(registration.segment_bytes.size(), 0);
  for (const Piece& piece : registration.pieces) {
    const std::uint32_t item_bytes = ItemBytes(registration.tensors[piece.tensor].dtype);
    begin[piece.segment] = std::min(begin[piece.segment], piece.offset);
    end[piece.segment] = std::max(end[piece.segment], EndOffset(piece, item_bytes));
  }
  std::vector<std::span<std::byte>> parts;
  for (std::size_t i = 0; i < begin.size(); ++i) {
    if (begin[i] >= end[i]) continue;
    parts.emplace_back(memory.bases()[i] + begin[i], end[i] - begin[i]);
  }
  return parts;
}

// A read-only mapping is populated for reading; a hint, so failure does not matter.
void TouchSource(std::span<std::byte> part) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(part.data()) & ~(page - 1);
  const auto end = reinterpret_cast<std::uintptr_t>(part.data()) + part.size();
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
}

Status TouchTarget(const Registration& registration, const MemoryAccess& memory,
                   std::string_view what, std::string_view otherwise = "") {
  return TouchPieces(registration, memory)
      .Annotate(fmt::format("{}; give the machine (or its memory cgroup) more memory{}", what,
                            otherwise));
}

}  // namespace

Status TouchPieces(const Registration& registration, const MemoryAccess& memory) {
  const std::vector<std::span<std::byte>> parts = UsedParts(registration, memory);
  TB_RETURN_IF_ERROR(CheckMemoryLeft(parts));
  for (const std::span<std::byte> part : parts) TB_RETURN_IF_ERROR(TouchPages(part));
  return {};
}

Result<CheckedRegistration> CheckRegistration(const RankIdentity& identity, wire::Register asked,
                                              const MemoryAccess& memory) {
  const TimePoint begin = Clock::Real().Now();
  const bool is_target = identity.role == Role::kConsumer;
  TB_RETURN_IF_ERROR(CheckSegments(asked.registration, memory));
  TB_RETURN_IF_ERROR(Validate(asked.registration, identity.rank, is_target));
  const RankLayout layout = LayoutOf(asked.registration);
  TB_RETURN_IF_ERROR(Validate(layout, identity.rank));
  TB_RETURN_IF_ERROR(planner::CheckBuffers(layout, asked.registration, identity.rank, is_target));
  CheckedRegistration checked;
  const std::vector<std::byte> serialized = Serialize(layout);
  checked.layout.assign(reinterpret_cast<const char*>(serialized.data()), serialized.size());
  checked.pieces =
      std::make_shared<const PieceIndex>(std::move(asked.registration), identity.channel);
  const Registration& registration = checked.pieces->registration();
  if (is_target && asked.flip == FlipMode::kShadow) {
    TB_ASSIGN_OR_RETURN(checked.shadow, CreateTwin("tensorbus-shadow", memory.segment_bytes()));
  }
  const TimePoint touch = Clock::Real().Now();
  checked.register_seconds = Seconds(touch - begin);
  if (is_target) {
    if (memory.addressable()) {
      TB_RETURN_IF_ERROR(TouchTarget(registration, memory, "target memory"));
    }
    if (checked.shadow != nullptr) {
      TB_RETURN_IF_ERROR(TouchTarget(registration, *checked.shadow, "shadow copy",
                                     ", or register with flip in_place"));
    }
  } else if (memory.addressable()) {
    for (const std::span<std::byte> part : UsedParts(registration, memory)) TouchSource(part);
  }
  checked.prefault_seconds = Seconds(Clock::Real().Now() - touch);
  return checked;
}

}  // namespace tensorbus::agent
