#include "agent/trace_ring.h"

#include <ctime>

namespace tensorbus::agent {

std::uint64_t RealtimeNs() {
  timespec now = {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

void TraceRing::Add(TraceRecord record) {
  if (records_.size() < record_count_max_) {
    records_.push_back(std::move(record));
    return;
  }
  records_[next_] = std::move(record);
  next_ = (next_ + 1) % record_count_max_;
}

std::vector<TraceRecord> TraceRing::Records() const {
  std::vector<TraceRecord> ordered(records_.begin() + static_cast<std::ptrdiff_t>(next_),
                                   records_.end());
  ordered.insert(ordered.end(), records_.begin(),
                 records_.begin() + static_cast<std::ptrdiff_t>(next_));
  return ordered;
}

}  // namespace tensorbus::agent
