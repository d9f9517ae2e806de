#pragma once

#include <string>

#include "tensorbus/base/status.h"

namespace tensorbus::daemon {

/// 32 random bytes of the kernel. Error: what getrandom() says.
Result<std::string> RandomSecret();

}  // namespace tensorbus::daemon
