#include "agent/trace_ring.h"

namespace tensorbus::agent {

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
