#include "tensorbus/rpc/status_map.h"

#include <string>

namespace tensorbus::rpc {

namespace {

constexpr bool Same(Code ours, grpc::StatusCode theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(Same(Code::kOk, grpc::StatusCode::OK));
static_assert(Same(Code::kCancelled, grpc::StatusCode::CANCELLED));
static_assert(Same(Code::kUnknown, grpc::StatusCode::UNKNOWN));
static_assert(Same(Code::kInvalidArgument, grpc::StatusCode::INVALID_ARGUMENT));
static_assert(Same(Code::kDeadlineExceeded, grpc::StatusCode::DEADLINE_EXCEEDED));
static_assert(Same(Code::kNotFound, grpc::StatusCode::NOT_FOUND));
static_assert(Same(Code::kAlreadyExists, grpc::StatusCode::ALREADY_EXISTS));
static_assert(Same(Code::kPermissionDenied, grpc::StatusCode::PERMISSION_DENIED));
static_assert(Same(Code::kResourceExhausted, grpc::StatusCode::RESOURCE_EXHAUSTED));
static_assert(Same(Code::kFailedPrecondition, grpc::StatusCode::FAILED_PRECONDITION));
static_assert(Same(Code::kAborted, grpc::StatusCode::ABORTED));
static_assert(Same(Code::kOutOfRange, grpc::StatusCode::OUT_OF_RANGE));
static_assert(Same(Code::kUnimplemented, grpc::StatusCode::UNIMPLEMENTED));
static_assert(Same(Code::kInternal, grpc::StatusCode::INTERNAL));
static_assert(Same(Code::kUnavailable, grpc::StatusCode::UNAVAILABLE));
static_assert(Same(Code::kDataLoss, grpc::StatusCode::DATA_LOSS));
static_assert(Same(Code::kUnauthenticated, grpc::StatusCode::UNAUTHENTICATED));

constexpr std::uint32_t kCodeMax = static_cast<std::uint32_t>(Code::kUnauthenticated);
constexpr std::uint32_t kReasonMax = static_cast<std::uint32_t>(Reason::kBusy);

Status Make(std::uint32_t code, std::uint32_t reason, const std::string& message,
            std::int64_t native) {
  if (code == 0) return {};
  return {code <= kCodeMax ? static_cast<Code>(code) : Code::kUnknown, message,
          reason <= kReasonMax ? static_cast<Reason>(reason) : Reason::kNone, native};
}

}  // namespace

proto::Error ToProto(const Status& status) {
  proto::Error error;
  error.set_code(static_cast<std::uint32_t>(status.code()));
  error.set_reason(static_cast<std::uint32_t>(status.reason()));
  error.set_message(status.message());
  error.set_native(status.native());
  return error;
}

Status FromProto(const proto::Error& error) {
  return Make(error.code(), error.reason(), error.message(), error.native());
}

grpc::Status ToGrpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  proto::Error details = ToProto(status);
  details.clear_message();  // it stands in the status itself
  return {static_cast<grpc::StatusCode>(status.code()), status.message(),
          details.SerializeAsString()};
}

Status FromGrpc(const grpc::Status& status) {
  proto::Error details;
  if (!details.ParseFromString(status.error_details())) details.Clear();
  return Make(static_cast<std::uint32_t>(status.error_code()), details.reason(),
              status.error_message(), details.native());
}

}  // namespace tensorbus::rpc
