#include "tensorbus/rpc/grpc_log.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>

#include "tensorbus/base/log.h"

namespace tensorbus::rpc {

namespace {

void Write(gpr_log_func_args* args) {
  // What gRPC calls an error is mostly a peer that went away; who cares hears of it as a Status.
  const bool error = args->severity == GPR_LOG_SEVERITY_ERROR;
  Log(error ? LogLevel::kWarn : LogLevel::kDebug, "grpc", {{"message", args->message}});
}

}  // namespace

void RouteGrpcLog() {
  grpc_init();  // the function takes hold only after this; never shut down
  gpr_set_log_function(&Write);
}

}  // namespace tensorbus::rpc
