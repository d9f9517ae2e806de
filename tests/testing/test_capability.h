#pragma once

#include <string>

#include "tensorbus/transport/capability.h"

namespace tensorbus::testing {

/// A capability for tests: equal for equal letters.
inline transport::Capability TestCapability(char letter = 'c') {
  return transport::Capability::FromBytes(std::string(transport::Capability::kBytes, letter))
      .value();
}

}  // namespace tensorbus::testing
