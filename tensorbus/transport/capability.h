#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "tensorbus/base/status.h"

namespace tensorbus::transport {

/// What a pull must show to read a route: a secret that the daemon draws for each session and tells
/// to the agents that take part in it. Cannot be printed or compared but by Opens(). A value.
class Capability {
 public:
  static constexpr std::size_t kBytes = 32;

  /// None: is shown in vain, and nothing can be exposed with it.
  Capability() = default;
  /// Error: kInvalidArgument/kMalformed for another number of bytes; the message has none of them.
  static Result<Capability> FromBytes(std::string_view bytes);

  bool none() const { return secret_.empty(); }
  /// Whether this is the one shown; takes the same time wherever two differ.
  bool Opens(const Capability& exposed) const;
  /// For proofs that keep it to themselves.
  std::string_view secret() const { return secret_; }

 private:
  std::string secret_;
};

}  // namespace tensorbus::transport
