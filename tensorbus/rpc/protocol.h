#pragma once

#include <cstdint>

namespace tensorbus::rpc {

/// What agent and daemon speak over gRPC. Peers of another number are refused; it grows with any
/// change that an older peer would misread.
inline constexpr std::uint32_t kControlProtocol = 2;

}  // namespace tensorbus::rpc
