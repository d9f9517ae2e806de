#include "tensorbus/transport/pull_state.h"

#include <algorithm>
#include <chrono>
#include <fmt/format.h>

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
    outcome = failure_.ok() ? Result<PullResult>(std::move(result_)) : Result<PullResult>(failure_);
    done = std::move(done_);
  }
  done(std::move(*outcome));
  return true;
}

Status PullState::CheckMemory() {
  const auto blocks = static_cast<std::uint32_t>(target_.end().blocks.size());
  const auto sum_of = [&](const StridedBlock& place, DigestSum& sum) -> Status {
    const std::uint64_t bytes = place.bytes();
    for (std::uint64_t at = 0; at < bytes; at += kCheckStretchBytes) {
      if (std::chrono::steady_clock::now() >= options_.deadline) {
        return {Code::kDeadlineExceeded, RouteName(key_) + ": deadline passed in the last check"};
      }
      sum += kernels::DigestRange(place,
                                  {.first = at, .count = std::min(bytes - at, kCheckStretchBytes)});
    }
    return {};
  };
  for (std::uint32_t i = 0; i < blocks; ++i) {
    DigestSum want;
    {
      const MutexLock lock(mutex_);
      want = result_.source.blocks[i];
    }
    DigestSum sum;
    TB_RETURN_IF_ERROR(sum_of(target_.check(i), sum));
    if (sum != want) return BlockMismatch(key_, i, "memory changed after it was written");
    for (const RouteEnd::Alias& alias : target_.aliases(i)) {
      sum = {};
      TB_RETURN_IF_ERROR(sum_of(alias.place, sum));
      if (sum != want) return BlockMismatch(key_, i, "an alias changed after it was written");
    }
  }
  MutexLock lock(mutex_);
  result_.last_byte = SinceEpoch();
  return {};
}

}  // namespace tensorbus::transport
