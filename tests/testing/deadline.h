#pragma once

#include "tensorbus/base/clock.h"

namespace tensorbus::testing {

inline TimePoint In(Nanos timeout) {
  return Clock::Real().Now() + timeout;
}

/// For what shall not take long, but may on a loaded machine.
inline TimePoint Soon() {
  return In(std::chrono::seconds(10));
}

}  // namespace tensorbus::testing
