#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "tensorbus/base/mutex.h"
#include "tensorbus/transport/foreign_memory.h"
#include "tests/conformance/worlds.h"

namespace tensorbus::transport {

/// This process's memory behind addresses that fault when anybody but this class uses them.
class FakeForeignMemory final : public ForeignMemory {
 public:
  /// Smaller than what transports move at a time, and no multiple of anything.
  static constexpr std::uint64_t kStageBytes = 100001;
  static constexpr unsigned kStages = 2;

  static StridedBlock Hide(StridedBlock block);
  static StridedBlock Reveal(const StridedBlock& block);

  std::uint64_t stage_bytes() const override { return kStageBytes; }
  Result<ForeignStage> Borrow(TimePoint deadline) override;
  Status Read(std::span<const ForeignPart> parts, std::span<std::byte> out,
              TimePoint deadline) override;
  Status Write(std::span<const ForeignPart> parts, std::span<const std::byte> in,
               TimePoint deadline) override;

  /// Makes every later call fail with `status`.
  void Break(Status status);
  std::uint64_t calls() const { return calls_.load(); }

 private:
  Status Begin(TimePoint deadline);

  std::atomic<std::uint64_t> calls_{0};
  Mutex mutex_;
  CondVar returned_;
  unsigned lent_ TB_GUARDED_BY(mutex_) = 0;
  Status broken_ TB_GUARDED_BY(mutex_);
};

struct ForeignEnds {
  bool source = false;
  bool target = false;
};

/// `make`'s world, in which the ends named lie in foreign memory; what is exposed and pulled there
/// may be ordinary memory.
class ForeignWorld final : public World {
 public:
  ForeignWorld(std::unique_ptr<World> (*make)(WorldOptions), WorldOptions options,
               ForeignEnds ends);
  ~ForeignWorld() override;
  Transport& source() override;
  Transport& target() override;
  std::string peer() override;
  std::unique_ptr<Transport> TakeTarget() override;

  FakeForeignMemory& memory() { return *memory_; }

 private:
  class HidingTransport;

  std::shared_ptr<FakeForeignMemory> memory_ = std::make_shared<FakeForeignMemory>();
  std::unique_ptr<World> inner_;
  std::unique_ptr<HidingTransport> source_;
  std::unique_ptr<HidingTransport> target_;
};

}  // namespace tensorbus::transport
