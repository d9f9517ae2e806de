#pragma once

#include <chrono>
#include <cstdint>

namespace tensorbus {

using Nanos = std::chrono::nanoseconds;
/// A point on the monotonic clock of this process.
using TimePoint = std::chrono::steady_clock::time_point;

inline double Seconds(Nanos duration) {
  return std::chrono::duration<double>(duration).count();
}

/// Nanoseconds of CLOCK_REALTIME now: for people and for lining up what several machines wrote
/// down, never for measuring.
inline std::uint64_t RealtimeNs() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<Nanos>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}

/// Where time comes from; a test double (ManualClock in tests/testing) replaces it. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() = 0;
  /// The machine's monotonic clock.
  static Clock& Real();
};

}  // namespace tensorbus
