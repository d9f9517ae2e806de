#include <algorithm>

#include "tensorbus/transport/route_check.h"
#include "tensorbus/transport/tcp_target.h"

namespace tensorbus::transport::tcp {

TcpPull::TcpPull(const RouteKey& key, RouteEnd target, PullOptions options, Transport::Done done)
    : state(key, std::move(target), std::move(options), std::move(done)),
      map(state.target().end().blocks),
      shape(ShapeOf(state.target().end())) {}

Peer::Peer(std::string endpoint, Address address, TargetContext& context,
           const std::vector<std::unique_ptr<IoLoop>>& loops)
    : endpoint_(std::move(endpoint)), address_(std::move(address)), context_(context) {
  for (unsigned i = 0; i < context.options.streams_per_peer; ++i) {
    IoLoop& loop = *loops[i % loops.size()];
    streams_.emplace_back(&loop, std::make_shared<TargetStream>(loop, *this, context));
  }
}

void Peer::Add(std::shared_ptr<TcpPull> pull) {
  const MutexLock lock(mutex_);
  pulls_.push_back(std::move(pull));
}

void Peer::Remove(const std::shared_ptr<TcpPull>& pull) {
  const MutexLock lock(mutex_);
  std::erase(pulls_, pull);
}

std::vector<std::shared_ptr<TcpPull>> Peer::Pulls() const {
  const MutexLock lock(mutex_);
  return pulls_;
}

std::optional<PullWindow> Peer::Claim() {
  const TcpOptions& options = context_.options;
  const MutexLock lock(mutex_);
  for (std::size_t i = 0; i < pulls_.size(); ++i) {
    turn_ = turn_ + 1 < pulls_.size() ? turn_ + 1 : 0;
    const std::shared_ptr<TcpPull>& pull = pulls_[turn_];
    const bool all_asked = pull->asked && pull->next == pull->map.bytes();
    if (all_asked || pull->state.failed()) continue;
    const bool foreign = pull->state.target().end().memory != nullptr;
    std::uint64_t bytes_max = std::min(options.window_bytes, options.credit_bytes);
    if (foreign) bytes_max = std::min(bytes_max, kForeignBufferBytes);
    const std::uint64_t count = pull->map.Window(pull->next, bytes_max, kPartsMax);
    if (pull->in_flight_bytes != 0 && pull->in_flight_bytes + count > options.credit_bytes) {
      continue;
    }
    const PullWindow window = {.pull = pull, .first = pull->next, .count = count};
    pull->asked = true;
    pull->next += count;
    pull->in_flight_bytes += count;
    return window;
  }
  return std::nullopt;
}

void Peer::Return(const PullWindow& window) {
  const MutexLock lock(mutex_);
  window.pull->in_flight_bytes -= window.count;
}

void Peer::Wake() {
  for (const auto& [loop, stream] : streams_) {
    loop->Post([target = stream] { target->Wake(); });
  }
}

void Peer::Shutdown() {
  for (const auto& [loop, stream] : streams_) {
    loop->Post([target = stream] { target->Shutdown(); });
  }
}

bool Peer::closed() const {
  return std::all_of(streams_.begin(), streams_.end(), [](const auto& entry) {
    return entry.second->closed() && entry.second.use_count() == 1;
  });
}

}  // namespace tensorbus::transport::tcp
