#include "agent/bucket_channel.h"

#include <algorithm>
#include <chrono>
#include <fmt/format.h>

namespace tensorbus::agent {
namespace {

/// An order fails this long before its caller's deadline (or at half of what is left), so that the
/// failure that names the worker is the one that is heard.
constexpr Nanos kMargin = std::chrono::milliseconds(250);

}  // namespace

BucketChannel::BucketChannel(std::string owner, std::uint64_t number, SendFrame send,
                             Nanos patience)
    : owner_(std::move(owner)),
      send_(std::move(send)),
      patience_(patience),
      next_request_((number << 32) + 1) {}

void BucketChannel::Attach(const wire::AttachBucket& bucket, UniqueFd fd) {
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(fd));
  send_(wire::MessageType::kAttachBucket, 0, wire::Encode(bucket), std::move(fds));
}

TimePoint BucketChannel::GiveUpAt(TimePoint deadline) const {
  const TimePoint now = std::chrono::steady_clock::now();
  if (deadline - now > patience_ + kMargin) return now + patience_;
  const Nanos left = std::max<Nanos>(Nanos{}, deadline - now);
  return deadline - std::min(kMargin, left / 2);
}

Status BucketChannel::Ask(wire::MessageType type, const wire::BucketWork& work,
                          TimePoint deadline) {
  const TimePoint begin = std::chrono::steady_clock::now();
  const TimePoint give_up = GiveUpAt(deadline);
  std::vector<std::byte> body = wire::Encode(work);
  std::uint64_t request = 0;
  {
    const MutexLock lock(mutex_);
    TB_RETURN_IF_ERROR(closed_);
    request = next_request_++;
    waiting_[request];
  }
  send_(type, request, std::move(body), {});
  const MutexLock lock(mutex_);
  std::optional<Status>& answer = waiting_[request];
  bool in_time = true;
  while (!answer.has_value() && closed_.ok() && in_time) {
    in_time = answered_.WaitUntil(mutex_, give_up);
  }
  Status status = closed_;
  if (answer.has_value()) {
    status = answer->ok() ? Status() : answer->Annotate(owner_);
  } else if (status.ok()) {
    const double waited = Seconds(std::chrono::steady_clock::now() - begin);
    status = Status(
        Code::kDeadlineExceeded,
        fmt::format("{} did not {} its private memory within {:.1f} s: it has to call poll(), wait "
                    "for something, or start the service thread",
                    owner_, type == wire::MessageType::kPack ? "pack" : "unpack", waited),
        Reason::kMissingRank);
  }
  waiting_.erase(request);
  return status;
}

void BucketChannel::OnDone(std::uint64_t request, const Status& status) {
  const MutexLock lock(mutex_);
  const auto found = waiting_.find(request);
  if (found == waiting_.end()) return;
  found->second = status;
  answered_.NotifyAll();
}

void BucketChannel::Close(const Status& why) {
  const MutexLock lock(mutex_);
  if (closed_.ok()) closed_ = why;
  answered_.NotifyAll();
}

}  // namespace tensorbus::agent
