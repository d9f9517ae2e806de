#include "tensorbus/transport/faulty_transport.h"

#include <algorithm>
#include <utility>

#include "tensorbus/kernels/copy.h"
#include "tensorbus/transport/route_check.h"

namespace tensorbus::transport {

namespace {

/// Memory that stands in for the place of a block, packed.
using Stray = std::vector<std::byte>;

StridedBlock Redirect(StridedBlock block, std::vector<std::shared_ptr<Stray>>& strays) {
  strays.push_back(std::make_shared<Stray>(block.bytes() + 1));
  block.base = strays.back()->data();
  std::uint64_t stride = block.item_bytes;
  for (std::size_t d = block.rank; d-- > 0;) {
    block.strides[d] = stride;
    stride *= block.extents[d];
  }
  return block;
}

/// Moves the bytes of a range one row on, the last row to the front.
void RotateRows(const StridedBlock& place, kernels::ByteRange range) {
  const std::uint64_t rows = place.rank == 0 ? 1 : place.extents[0];
  const std::uint64_t row_bytes = place.bytes() / std::max<std::uint64_t>(1, rows);
  if (range.count <= row_bytes || row_bytes == 0) return;
  std::vector<std::byte> bytes(range.count);
  kernels::PackRange(place, range.first, bytes);
  std::rotate(bytes.begin(), bytes.end() - static_cast<std::ptrdiff_t>(row_bytes), bytes.end());
  kernels::UnpackRange(bytes, range.first, place);
}

void FlipBit(const StridedBlock& place, std::uint64_t byte) {
  std::byte value = {};
  kernels::PackRange(place, byte, {&value, 1});
  value ^= std::byte{1};
  kernels::UnpackRange({&value, 1}, byte, place);
}

bool InMemory(Fault::Kind kind) {
  return kind == Fault::Kind::kFlipBit || kind == Fault::Kind::kShiftRow;
}

/// Gives the copy wrong places and leaves the right ones to the check.
void Misplace(const Fault& fault, RouteEnd& target, std::vector<std::shared_ptr<Stray>>& strays) {
  std::vector<StridedBlock>& blocks = target.blocks;
  if (target.readback.empty()) target.readback = blocks;
  const auto swap_places = [](StridedBlock& a, StridedBlock& b) {
    std::swap(a.base, b.base);
    std::swap(a.strides, b.strides);
  };
  switch (fault.kind) {
    case Fault::Kind::kDropBlock:
      blocks[fault.block] = Redirect(blocks[fault.block], strays);
      break;
    case Fault::Kind::kRepeatBlock: {
      RouteEnd::Alias repeated = {.block = fault.block, .place = blocks[fault.block]};
      repeated.place.base = blocks[fault.other].base;
      repeated.place.strides = blocks[fault.other].strides;
      target.aliases.push_back(repeated);
      blocks[fault.other] = Redirect(blocks[fault.other], strays);
      break;
    }
    case Fault::Kind::kSwapBlocks:
      swap_places(blocks[fault.block], blocks[fault.other]);
      break;
    case Fault::Kind::kAckEarly:
      for (StridedBlock& block : blocks) block = Redirect(block, strays);
      for (RouteEnd::Alias& alias : target.aliases) {
        alias.readback = alias.check();
        alias.place = Redirect(alias.place, strays);
      }
      break;
    default:
      break;
  }
}

}  // namespace

std::shared_ptr<FaultPlan> FaultPlan::Create(std::vector<Fault> faults) {
  return std::shared_ptr<FaultPlan>(new FaultPlan(std::move(faults)));
}

FaultPlan::FaultPlan(std::vector<Fault> faults) : faults_(std::move(faults)) {}

LandingHook FaultPlan::Hook() {
  return [self = shared_from_this()](const RouteKey& key, std::uint32_t block,
                                     const StridedBlock& place, kernels::ByteRange range) {
    self->Damage(key, block, place, range);
  };
}

std::vector<Fault> FaultPlan::NextPull(const RouteKey& key) {
  const MutexLock lock(mutex_);
  std::vector<Fault> faults;
  std::vector<Fault>& armed = armed_[key];
  armed.clear();
  for (const Fault& fault : faults_) {
    if (fault.pull != pulls_) continue;
    (InMemory(fault.kind) ? armed : faults).push_back(fault);
  }
  ++pulls_;
  return faults;
}

void FaultPlan::Damage(const RouteKey& key, std::uint32_t block, const StridedBlock& place,
                       kernels::ByteRange range) {
  const MutexLock lock(mutex_);
  const auto found = armed_.find(key);
  if (found == armed_.end()) return;
  for (const Fault& fault : found->second) {
    if (fault.block != block) continue;
    if (fault.kind == Fault::Kind::kShiftRow) RotateRows(place, range);
    if (fault.kind == Fault::Kind::kFlipBit && fault.byte >= range.first &&
        fault.byte < range.first + range.count) {
      FlipBit(place, fault.byte);
    }
  }
}

/// A pull that waits for its end. `done` belongs to the executor.
struct FaultyTransport::Held {
  RouteKey key;
  Done done;

  void End(Status status) {
    if (const Done ended = std::exchange(done, nullptr); ended != nullptr) ended(std::move(status));
  }
};

FaultyTransport::FaultyTransport(std::unique_ptr<Transport> inner, std::shared_ptr<FaultPlan> plan,
                                 Executor& executor)
    : inner_(std::move(inner)), plan_(std::move(plan)), executor_(executor) {}

FaultyTransport::~FaultyTransport() {
  const MutexLock lock(mutex_);
  for (const auto& held : held_) {
    executor_.Post(
        [held] { held->End(Status(Code::kCancelled, "transport gone", Reason::kCancelled)); });
  }
}

Status FaultyTransport::Expose(const RouteKey& key, RouteEnd source) {
  return inner_->Expose(key, std::move(source));
}

void FaultyTransport::Withdraw(const RouteKey& key) {
  inner_->Withdraw(key);
}

void FaultyTransport::Hold(const RouteKey& key, TimePoint deadline, Done done) {
  const auto held = std::make_shared<Held>(Held{.key = key, .done = std::move(done)});
  executor_.PostAt(deadline, [held] {
    held->End(Status(Code::kDeadlineExceeded, RouteName(held->key) + ": held back too long"));
  });
  const MutexLock lock(mutex_);
  held_.push_back(held);
}

void FaultyTransport::Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) {
  std::vector<std::shared_ptr<Stray>> strays;
  bool lose_receipts = false;
  for (const Fault& fault : plan_->NextPull(key)) {
    if (fault.kind == Fault::Kind::kDelay) return Hold(key, options.deadline, std::move(done));
    if (fault.kind == Fault::Kind::kFail) {
      executor_.Post([done = std::move(done), status = fault.status] { done(status); });
      return;
    }
    if (fault.kind == Fault::Kind::kLoseReceipts) lose_receipts = true;
    TB_CHECK(fault.block < std::max<std::size_t>(1, target.blocks.size()) &&
             fault.other < std::max<std::size_t>(1, target.blocks.size()));
    if (!target.blocks.empty()) Misplace(fault, target, strays);
  }
  if (strays.empty() && !lose_receipts) {
    return inner_->Pull(key, std::move(target), std::move(options), std::move(done));
  }
  inner_->Pull(key, std::move(target), std::move(options),
               [strays, lose_receipts, done = std::move(done)](Result<PullResult> result) {
                 if (result.ok() && lose_receipts) result = PullResult{};
                 done(std::move(result));
               });
}

void FaultyTransport::Cancel(SessionId session) {
  {
    const MutexLock lock(mutex_);
    for (const auto& held : held_) {
      if (held->key.session != session) continue;
      executor_.Post([held] {
        held->End(
            Status(Code::kCancelled, RouteName(held->key) + " was cancelled", Reason::kCancelled));
      });
    }
    std::erase_if(held_, [&](const auto& held) { return held->key.session == session; });
  }
  inner_->Cancel(session);
}

}  // namespace tensorbus::transport
