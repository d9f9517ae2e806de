#pragma once

#include <string>
#include <utility>

#include "tensorbus/base/status.h"

namespace tensorbus {

/// The failure of input from outside that is not well formed, or well formed and not possible
/// (then with the reason that says so).
inline Status Malformed(std::string message, Reason reason = Reason::kMalformed) {
  return {Code::kInvalidArgument, std::move(message), reason};
}

}  // namespace tensorbus
