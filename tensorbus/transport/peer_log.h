#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"

namespace tensorbus::transport {

/// Logs what strangers cause, at most kLinesMax lines a period, so that whoever keeps knocking does
/// not fill the log; the next line says how many were held back. Thread-safe.
class PeerLog {
 public:
  static constexpr std::uint32_t kLinesMax = 10;
  static constexpr Nanos kPeriod = std::chrono::seconds(10);

  void Write(std::string_view event, const Status& why);

  /// Lines held back so far when one may be written now; none when it may not.
  std::optional<std::uint64_t> Admit(TimePoint now);

 private:
  Mutex mutex_;
  TimePoint period_end_ TB_GUARDED_BY(mutex_);
  std::uint32_t lines_ TB_GUARDED_BY(mutex_) = 0;
  std::uint64_t held_back_ TB_GUARDED_BY(mutex_) = 0;
};

}  // namespace tensorbus::transport
