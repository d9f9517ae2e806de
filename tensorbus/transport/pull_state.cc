#include "tensorbus/transport/pull_state.h"

#include <algorithm>
#include <chrono>
#include <fmt/format.h>

#include "tensorbus/transport/foreign_landing.h"
#include "tensorbus/transport/route_check.h"

namespace tensorbus::transport {

namespace {

Nanos SinceEpoch() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

/// Bytes of the last pass between two looks at the deadline.
constexpr std::uint64_t kCheckStretchBytes = std::uint64_t{1} << 20;

}  // namespace

PullState::PullState(const RouteKey& key, RouteEnd target, PullOptions options,
                     Transport::Done done)
    : key_(key),
      target_(std::move(target)),
      options_(std::move(options)),
      bytes_(target_.end().bytes()),
      done_(std::move(done)),
      left_bytes_(bytes_) {
  result_.source.blocks.resize(target_.end().blocks.size());
  result_.target.blocks.resize(target_.end().blocks.size());
}

bool PullState::Enter() {
  const MutexLock lock(mutex_);
  if (!failure_.ok() || reported_) return false;
  ++inside_;
  if (result_.first_byte == Nanos{}) result_.first_byte = SinceEpoch();
  return true;
}

void PullState::Leave() {
  const MutexLock lock(mutex_);
  --inside_;
}

void PullState::Add(std::uint32_t block, const Landing& landing) {
  const MutexLock lock(mutex_);
  if (!failure_.ok()) return;
  if (!landing.intact) {
    failure_ = BlockMismatch(key_, block, "what was read back differs from what was sent");
    return;
  }
  result_.source.blocks[block] += landing.source;
  result_.target.blocks[block] += landing.target;
  TB_CHECK(landing.source.bytes <= left_bytes_);
  left_bytes_ -= landing.source.bytes;
  if (left_bytes_ == 0) result_.last_byte = SinceEpoch();
}

void PullState::Fail(Status status) {
  const MutexLock lock(mutex_);
  if (failure_.ok() && !reported_) failure_ = std::move(status);
}

void PullState::CheckDeadline(TimePoint now) {
  if (now < options_.deadline) return;
  const MutexLock lock(mutex_);
  if (!failure_.ok() || reported_) return;
  failure_ = Status(
      Code::kDeadlineExceeded,
      fmt::format("{} from {}: deadline passed with {} of {} bytes missing", RouteName(key_),
                  options_.peer.empty() ? "this process" : options_.peer, left_bytes_, bytes_));
}

void PullState::Cancel() {
  Fail(Status(Code::kCancelled, RouteName(key_) + " was cancelled", Reason::kCancelled));
}

bool PullState::failed() const {
  const MutexLock lock(mutex_);
  return !failure_.ok();
}

bool PullState::complete() const {
  const MutexLock lock(mutex_);
  return failure_.ok() && left_bytes_ == 0;
}

bool PullState::over() const {
  const MutexLock lock(mutex_);
  return (left_bytes_ == 0 || !failure_.ok()) && inside_ == 0;
}

bool PullState::Report() {
  bool check_memory = false;
  {
    const MutexLock lock(mutex_);
    if (reported_ || inside_ != 0 || (left_bytes_ != 0 && failure_.ok())) return false;
    reported_ = true;
    check_memory = failure_.ok() && options_.proof >= Proof::kMemory;
  }
  // From here on nobody else touches the state: Enter() and Fail() see `reported_`.
  const Status memory = check_memory ? CheckMemory() : Status();
  Transport::Done done;
  std::optional<Result<PullResult>> outcome;
  {
    const MutexLock lock(mutex_);
    if (failure_.ok()) failure_ = memory;
    // A route without bytes has a time too.
    if (result_.first_byte == Nanos{}) result_.first_byte = SinceEpoch();
    result_.last_byte = std::max(result_.last_byte, result_.first_byte);
    outcome = failure_.ok() ? Result<PullResult>(std::move(result_)) : Result<PullResult>(failure_);
    done = std::move(done_);
  }
  done(std::move(*outcome));
  return true;
}

Status PullState::SumPlaces(std::span<const StridedBlock> places,
                            std::vector<DigestSum>& sums) const {
  if (ForeignMemory* const memory = target_.end().memory.get(); memory != nullptr) {
    Result<std::vector<DigestSum>> read = DigestForeign(*memory, places, options_.deadline);
    if (!read.ok()) return read.status().Annotate(RouteName(key_) + ": last check");
    sums = *std::move(read);
    return {};
  }
  sums.assign(places.size(), {});
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::uint64_t bytes = places[i].bytes();
    for (std::uint64_t at = 0; at < bytes; at += kCheckStretchBytes) {
      if (std::chrono::steady_clock::now() >= options_.deadline) {
        return {Code::kDeadlineExceeded, RouteName(key_) + ": deadline passed in the last check"};
      }
      sums[i] += kernels::DigestRange(
          places[i], {.first = at, .count = std::min(bytes - at, kCheckStretchBytes)});
    }
  }
  return {};
}

Status PullState::CheckMemory() {
  const auto blocks = static_cast<std::uint32_t>(target_.end().blocks.size());
  std::vector<DigestSum> want;
  {
    const MutexLock lock(mutex_);
    want = result_.source.blocks;
  }
  std::vector<StridedBlock> places;
  for (std::uint32_t i = 0; i < blocks; ++i) places.push_back(target_.check(i));
  for (const RouteEnd::Alias& alias : target_.end().aliases) places.push_back(alias.check());
  std::vector<DigestSum> sums;
  TB_RETURN_IF_ERROR(SumPlaces(places, sums));
  for (std::uint32_t i = 0; i < blocks; ++i) {
    if (sums[i] != want[i]) {
      return BlockMismatch(key_, i, "memory changed after it was written");
    }
  }
  for (std::size_t i = 0; i < target_.end().aliases.size(); ++i) {
    const std::uint32_t block = target_.end().aliases[i].block;
    if (sums[blocks + i] != want[block]) {
      return BlockMismatch(key_, block, "an alias changed after it was written");
    }
  }
  MutexLock lock(mutex_);
  result_.last_byte = SinceEpoch();
  return {};
}

}  // namespace tensorbus::transport
