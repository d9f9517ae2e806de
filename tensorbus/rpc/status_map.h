#pragma once

#include <grpcpp/support/status.h>

#include "proto/tensorbus.pb.h"
#include "tensorbus/base/status.h"

namespace tensorbus::rpc {

/// A Status as it travels inside messages; OK is code 0.
proto::Error ToProto(const Status& status);
/// What the other side meant. Codes and reasons this build does not know become kUnknown and kNone,
/// so that a newer peer's error stays an error.
Status FromProto(const proto::Error& error);

/// A Status as the outcome of a call. Reason and native code ride in the error details.
grpc::Status ToGrpc(const Status& status);
Status FromGrpc(const grpc::Status& status);

}  // namespace tensorbus::rpc
