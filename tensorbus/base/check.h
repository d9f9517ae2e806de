#pragma once

namespace tensorbus::internal {

/// Prints the failed condition with its place and aborts.
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line);

}  // namespace tensorbus::internal

/// States what only a bug can break, one fact each; always on. Never for input from a peer, file or
/// user.
#define TB_CHECK(condition)     \
  (static_cast<bool>(condition) \
       ? static_cast<void>(0)   \
       : ::tensorbus::internal::CheckFailed(#condition, __FILE__, __LINE__))

/// The same in debug builds only, for facts too costly to check always.
#ifdef NDEBUG
#define TB_DCHECK(condition) static_cast<void>(sizeof(static_cast<bool>(condition)))
#else
#define TB_DCHECK(condition) TB_CHECK(condition)
#endif
