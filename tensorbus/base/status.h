#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "tensorbus/base/check.h"

namespace tensorbus {

/// gRPC's canonical codes, same numbers. `rpc` asserts that they agree.
enum class Code : std::uint8_t {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

/// What exactly went wrong; finer than Code. Numbers are on the wire: append only.
enum class Reason : std::uint8_t {
  kNone = 0,
  kStaleVersion = 1,        ///< a version or channel epoch that is not newer than the one known
  kLayoutMismatch = 2,      ///< layouts of two sides do not fit: shape, coverage, mesh
  kDtypeMismatch = 3,       ///< two sides name one tensor with different dtypes
  kUnknownTensor = 4,       ///< a tensor the other side does not have
  kOverlap = 5,             ///< boxes or pieces of one rank overlap
  kChecksumMismatch = 6,    ///< digest or checksum of what arrived differs from what was sent
  kPeerLost = 7,            ///< a process went away
  kMissingRank = 8,         ///< a rank did not come within its deadline
  kWriteDuringPublish = 9,  ///< published memory changed before it was released
  kDirty = 10,              ///< an in_place replica holds a mixture and must be repaired first
  kSecondPublisher = 11,    ///< another job already produces this channel
  kNotRunning = 12,         ///< no daemon or agent listens there
  kProtocolVersion = 13,    ///< the other side speaks another protocol version
  kOutOfMemory = 14,        ///< shared memory, staging budget or address space exhausted
  kMovedMemory = 15,        ///< a registered tensor no longer lives where it was registered
  kPlanMismatch = 16,       ///< two agents computed different plans for one session
  kMalformed = 17,          ///< input that is not well formed
  kNoHolder = 18,           ///< a needed part that no source rank holds
  kUnsupported = 19,        ///< asked for something this build or this machine cannot do
  kCancelled = 20,          ///< stopped on request
  kBusy = 21,               ///< a bound (queue, sessions, credit) is reached
};

/// How much is broken; recovery switches on it.
enum class Scope : std::uint8_t { kRequest = 0, kPeer = 1, kDevice = 2, kProcess = 3 };

std::string_view CodeName(Code code);        ///< "INVALID_ARGUMENT", …
std::string_view ReasonName(Reason reason);  ///< "layout_mismatch", …; "" for kNone
Scope ScopeOf(Reason reason);

/// Success, or one failure with a code for programs and a message for people. Immutable once made.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, Reason reason = Reason::kNone, std::int64_t native = 0)
      : code_(code), reason_(reason), native_(native), message_(std::move(message)) {
    TB_CHECK(code != Code::kOk);
  }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  Reason reason() const { return reason_; }
  Scope scope() const { return ScopeOf(reason_); }
  /// errno, a vendor's code or what the reason says (transport/route_check.h); 0 if none.
  std::int64_t native() const { return native_; }
  const std::string& message() const { return message_; }

  /// The same failure with "context: " put before the message; OK stays OK.
  Status Annotate(std::string_view context) const;
  /// "OK" or "INVALID_ARGUMENT (layout_mismatch): message".
  std::string ToString() const;

  friend bool operator==(const Status&, const Status&) = default;

 private:
  Code code_ = Code::kOk;
  Reason reason_ = Reason::kNone;
  std::int64_t native_ = 0;
  std::string message_;
};

std::ostream& operator<<(std::ostream& out, const Status& status);

/// A failure made from `error_number` (an errno): "what: strerror", with the nearest Code.
Status ErrnoStatus(int error_number, std::string_view what);

/// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  // Implicit on purpose: `return value;` and `return status;` both read well.
  Result(T value) : state_(std::move(value)) {}        // NOLINT(google-explicit-constructor)
  Result(Status status) : state_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    TB_CHECK(!std::get<Status>(state_).ok());
  }

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

  T& value() & {
    TB_CHECK(ok());
    return std::get<T>(state_);
  }
  const T& value() const& {
    TB_CHECK(ok());
    return std::get<T>(state_);
  }
  T&& value() && {
    TB_CHECK(ok());
    return std::get<T>(std::move(state_));
  }

  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<Status, T> state_;
};

}  // namespace tensorbus

#define TB_CONCAT_INNER_(a, b) a##b
#define TB_CONCAT_(a, b) TB_CONCAT_INNER_(a, b)

/// Returns from the enclosing function if `expr` (a Status) failed.
#define TB_RETURN_IF_ERROR(expr)                                     \
  do {                                                               \
    if (::tensorbus::Status tb_status_ = (expr); !tb_status_.ok()) { \
      return tb_status_;                                             \
    }                                                                \
  } while (false)

/// Declares `lhs` from the value of `expr` (a Result), or returns its Status.
#define TB_ASSIGN_OR_RETURN(lhs, expr) \
  TB_ASSIGN_OR_RETURN_IMPL_(TB_CONCAT_(tb_result_, __LINE__), lhs, expr)
#define TB_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                              \
  if (!result.ok()) {                                \
    return result.status();                          \
  }                                                  \
  lhs = std::move(result).value()
