#include "tensorbus/transport/capability.h"

#include <fmt/format.h>
#include <openssl/crypto.h>

namespace tensorbus::transport {

Result<Capability> Capability::FromBytes(std::string_view bytes) {
  if (bytes.size() != kBytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("a capability of {} bytes instead of {}", bytes.size(), kBytes),
                  Reason::kMalformed);
  }
  Capability capability;
  capability.secret_ = bytes;
  return capability;
}

bool Capability::Opens(const Capability& exposed) const {
  return secret_.size() == kBytes && exposed.secret_.size() == kBytes &&
         CRYPTO_memcmp(secret_.data(), exposed.secret_.data(), kBytes) == 0;
}

}  // namespace tensorbus::transport
