#include "tensorbus/daemon/secret.h"

#include <cerrno>
#include <sys/random.h>

namespace tensorbus::daemon {

Result<std::string> RandomSecret() {
  std::string secret(32, '\0');
  if (::getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    return ErrnoStatus(errno, "getrandom");
  }
  return secret;
}

}  // namespace tensorbus::daemon
