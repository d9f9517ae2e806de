#pragma once

#include <string_view>

#include "tensorbus/base/status.h"
#include "tensorbus/transport/capability.h"
#include "tensorbus/transport/tcp_frame.h"

namespace tensorbus::transport::tcp {

/// Fresh bytes from the system's generator. Error: kUnavailable when it has none.
Result<Nonce> MakeNonce();

/// What each side shows to prove that it knows the token, without sending it: HMAC-SHA256 under the
/// token over the side's name and both nonces, so that neither proof can be replayed or sent back.
Mac SourceMac(std::string_view token, const Nonce& target, const Nonce& source);
Mac TargetMac(std::string_view token, const Nonce& target, const Nonce& source);

/// What the target shows with each request to prove that it knows the session's capability, without
/// sending it: HMAC-SHA256 under it over both nonces of the connection and the route, so that it
/// serves for this route on this connection only.
Mac PullMac(const Capability& capability, const Nonce& target, const Nonce& source,
            const RouteKey& key);

/// Takes the same time wherever the two differ.
bool SameMac(const Mac& a, const Mac& b);

}  // namespace tensorbus::transport::tcp
