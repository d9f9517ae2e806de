#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensorbus/types/ids.h"

namespace tensorbus::agent {

/// One finished step of a session, for `tensorbusctl trace` and for reading a failure afterwards.
struct TraceRecord {
  std::string name;   ///< "prepare", "copy", "flip", …
  std::string track;  ///< "policy/engine/0/1"
  SessionId session;
  std::uint64_t begin_ns = 0;  ///< CLOCK_REALTIME
  std::uint64_t end_ns = 0;
  std::uint64_t bytes = 0;
};

/// The last records, a fixed number of them. Confined.
class TraceRing {
 public:
  explicit TraceRing(std::size_t record_count_max) : record_count_max_(record_count_max) {}

  void Add(TraceRecord record);
  /// Oldest first.
  std::vector<TraceRecord> Records() const;

 private:
  std::size_t record_count_max_;
  std::vector<TraceRecord> records_;
  std::size_t next_ = 0;
};

}  // namespace tensorbus::agent
