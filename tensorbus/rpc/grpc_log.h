#pragma once

namespace tensorbus::rpc {

/// Sends gRPC's own messages (refused handshakes, broken connections) through our log, as
/// `event=grpc`. Call once, before anything of gRPC runs.
void RouteGrpcLog();

}  // namespace tensorbus::rpc
