#pragma once

#include <string>
#include <utility>

#include "tensorbus/base/malformed.h"

namespace tensorbus::planner {

/// The failure of a rule, a view or a number that does not fit the layout it is used on.
inline Status Misfit(std::string message) {
  return Malformed(std::move(message), Reason::kLayoutMismatch);
}

}  // namespace tensorbus::planner
