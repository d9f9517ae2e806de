#include "tests/conformance/foreign_world.h"

#include <chrono>
#include <vector>

#include "tensorbus/kernels/copy.h"
#include "tensorbus/kernels/walk.h"

namespace tensorbus::transport {

namespace {

/// Makes an address of user memory one that no process can have.
constexpr std::uint64_t kHidden = std::uint64_t{1} << 62;

RouteEnd HideEnd(RouteEnd end, const std::shared_ptr<ForeignMemory>& memory) {
  for (StridedBlock& block : end.blocks) block = FakeForeignMemory::Hide(block);
  for (StridedBlock& block : end.readback) block = FakeForeignMemory::Hide(block);
  for (RouteEnd::Alias& alias : end.aliases) {
    alias.place = FakeForeignMemory::Hide(alias.place);
    if (alias.readback) alias.readback = FakeForeignMemory::Hide(*alias.readback);
  }
  end.memory = memory;
  return end;
}

}  // namespace

StridedBlock FakeForeignMemory::Hide(StridedBlock block) {
  block.base = kernels::PointerAt(kernels::AddressOf(block) ^ kHidden);
  return block;
}

StridedBlock FakeForeignMemory::Reveal(const StridedBlock& block) {
  return Hide(block);
}

Status FakeForeignMemory::Begin(TimePoint deadline) {
  ++calls_;
  if (std::chrono::steady_clock::now() >= deadline) {
    return {Code::kDeadlineExceeded, "foreign memory: too late"};
  }
  const MutexLock lock(mutex_);
  return broken_;
}

Result<ForeignStage> FakeForeignMemory::Borrow(TimePoint deadline) {
  const MutexLock lock(mutex_);
  while (lent_ == kStages) {
    if (!returned_.WaitUntil(mutex_, deadline)) {
      return Status(Code::kDeadlineExceeded, "foreign memory: no stage came free");
    }
  }
  ++lent_;
  auto bytes = std::make_shared<std::vector<std::byte>>(kStageBytes);
  const std::span<std::byte> span(*bytes);
  return ForeignStage(span, std::shared_ptr<void>(bytes.get(), [this, bytes](void*) {
                        const MutexLock back(mutex_);
                        --lent_;
                        returned_.NotifyAll();
                      }));
}

Status FakeForeignMemory::Read(std::span<const ForeignPart> parts, std::span<std::byte> out,
                               TimePoint deadline) {
  TB_RETURN_IF_ERROR(Begin(deadline));
  for (const ForeignPart& part : parts) {
    kernels::PackRange(Reveal(*part.block), part.first, out.first(part.count));
    out = out.subspan(part.count);
  }
  TB_CHECK(out.empty());
  return {};
}

Status FakeForeignMemory::Write(std::span<const ForeignPart> parts, std::span<const std::byte> in,
                                TimePoint deadline) {
  TB_RETURN_IF_ERROR(Begin(deadline));
  for (const ForeignPart& part : parts) {
    kernels::UnpackRange(in.first(part.count), part.first, Reveal(*part.block));
    in = in.subspan(part.count);
  }
  TB_CHECK(in.empty());
  return {};
}

void FakeForeignMemory::Break(Status status) {
  const MutexLock lock(mutex_);
  broken_ = std::move(status);
}

/// Another transport whose callers' memory is hidden from it.
class ForeignWorld::HidingTransport final : public Transport {
 public:
  HidingTransport(Transport& inner, ForeignEnds ends, std::shared_ptr<ForeignMemory> memory)
      : inner_(inner), ends_(ends), memory_(std::move(memory)) {}

  std::string_view name() const override { return inner_.name(); }
  std::string endpoint() const override { return inner_.endpoint(); }
  Status Expose(const RouteKey& key, RouteEnd source) override {
    return inner_.Expose(key, ends_.source ? HideEnd(std::move(source), memory_) : source);
  }
  void Withdraw(const RouteKey& key) override { inner_.Withdraw(key); }
  void Pull(const RouteKey& key, RouteEnd target, PullOptions options, Done done) override {
    if (ends_.target) target = HideEnd(std::move(target), memory_);
    inner_.Pull(key, std::move(target), std::move(options), std::move(done));
  }
  void Cancel(SessionId session) override { inner_.Cancel(session); }

 private:
  Transport& inner_;
  const ForeignEnds ends_;
  const std::shared_ptr<ForeignMemory> memory_;
};

ForeignWorld::ForeignWorld(std::unique_ptr<World> (*make)(WorldOptions), WorldOptions options,
                           ForeignEnds ends) {
  if (options.landing_hook != nullptr && ends.target) {
    options.landing_hook = [hook = options.landing_hook](const RouteKey& key, std::uint32_t block,
                                                         const StridedBlock& place,
                                                         kernels::ByteRange range) {
      hook(key, block, FakeForeignMemory::Reveal(place), range);
    };
  }
  inner_ = make(std::move(options));
  source_ = std::make_unique<HidingTransport>(inner_->source(), ends, memory_);
  target_ = std::make_unique<HidingTransport>(inner_->target(), ends, memory_);
}

ForeignWorld::~ForeignWorld() = default;

Transport& ForeignWorld::source() {
  return *source_;
}

Transport& ForeignWorld::target() {
  return *target_;
}

std::unique_ptr<Transport> ForeignWorld::TakeTarget() {
  return std::move(target_);
}

std::string ForeignWorld::peer() {
  return inner_->peer();
}

}  // namespace tensorbus::transport
