#include "tensorbus/base/status.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <system_error>

namespace tensorbus {
namespace internal {

void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, condition);
  std::abort();
}

}  // namespace internal

namespace {

constexpr std::array<std::string_view, 17> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

struct ReasonRow {
  std::string_view name;
  Scope scope;
};

constexpr std::array<ReasonRow, 22> kReasons = {{{"", Scope::kRequest},
                                                 {"stale_version", Scope::kRequest},
                                                 {"layout_mismatch", Scope::kRequest},
                                                 {"dtype_mismatch", Scope::kRequest},
                                                 {"unknown_tensor", Scope::kRequest},
                                                 {"overlap", Scope::kRequest},
                                                 {"checksum_mismatch", Scope::kRequest},
                                                 {"peer_lost", Scope::kPeer},
                                                 {"missing_rank", Scope::kPeer},
                                                 {"write_during_publish", Scope::kRequest},
                                                 {"dirty", Scope::kRequest},
                                                 {"second_publisher", Scope::kRequest},
                                                 {"not_running", Scope::kPeer},
                                                 {"protocol_version", Scope::kPeer},
                                                 {"out_of_memory", Scope::kProcess},
                                                 {"moved_memory", Scope::kRequest},
                                                 {"plan_mismatch", Scope::kRequest},
                                                 {"malformed", Scope::kRequest},
                                                 {"no_holder", Scope::kRequest},
                                                 {"unsupported", Scope::kRequest},
                                                 {"cancelled", Scope::kRequest},
                                                 {"busy", Scope::kRequest}}};

Code CodeOfErrno(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ESRCH:
      return Code::kNotFound;
    case EEXIST:
      return Code::kAlreadyExists;
    case EACCES:
    case EPERM:
      return Code::kPermissionDenied;
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
    case ENFILE:
      return Code::kResourceExhausted;
    case ETIMEDOUT:
      return Code::kDeadlineExceeded;
    case EINVAL:
      return Code::kInvalidArgument;
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
    case ENOTCONN:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return Code::kUnavailable;
    default:
      return Code::kInternal;
  }
}

}  // namespace

std::string_view CodeName(Code code) {
  const auto index = static_cast<std::size_t>(code);
  return index < kCodeNames.size() ? kCodeNames[index] : "UNKNOWN";
}

std::string_view ReasonName(Reason reason) {
  const auto index = static_cast<std::size_t>(reason);
  return index < kReasons.size() ? kReasons[index].name : "unknown";
}

Scope ScopeOf(Reason reason) {
  const auto index = static_cast<std::size_t>(reason);
  return index < kReasons.size() ? kReasons[index].scope : Scope::kRequest;
}

Status Status::Annotate(std::string_view context) const {
  if (ok()) return {};
  return {code_, fmt::format("{}: {}", context, message_), reason_, native_};
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  if (reason_ == Reason::kNone) return fmt::format("{}: {}", CodeName(code_), message_);
  return fmt::format("{} ({}): {}", CodeName(code_), ReasonName(reason_), message_);
}

std::ostream& operator<<(std::ostream& out, const Status& status) {
  return out << status.ToString();
}

Status ErrnoStatus(int error_number, std::string_view what) {
  Reason reason = Reason::kNone;
  if (error_number == ENOMEM || error_number == ENOSPC) reason = Reason::kOutOfMemory;
  if (error_number == ECONNRESET || error_number == EPIPE) reason = Reason::kPeerLost;
  if (error_number == ECONNREFUSED) reason = Reason::kNotRunning;
  // std::system_category rather than strerror: the latter shares a buffer between threads.
  return {CodeOfErrno(error_number),
          fmt::format("{}: {}", what, std::system_category().message(error_number)), reason,
          error_number};
}

}  // namespace tensorbus
