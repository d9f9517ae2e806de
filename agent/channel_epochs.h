#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "tensorbus/base/status.h"
#include "tensorbus/types/ids.h"

namespace tensorbus::agent {

/// The highest epoch this agent has heard of each channel, whatever daemon said it. A version of an
/// older one is never accepted again, and a daemon that starts without memory is told what to go on
/// from.
///
/// Bounded: beyond `channel_count_max` the channel that was heard of longest ago is forgotten.
/// Threads: confined to the executor.
class ChannelEpochs {
 public:
  /// Several times what one daemon serves.
  static constexpr std::size_t kChannelCountMax = 4096;

  explicit ChannelEpochs(std::size_t channel_count_max = kChannelCountMax)
      : channel_count_max_(channel_count_max) {}

  /// Error: kFailedPrecondition/kStaleVersion when a higher epoch was heard of before.
  Status Accept(const std::string& channel, ChannelEpoch epoch);
  /// 0 for a channel never heard of.
  ChannelEpoch Highest(const std::string& channel) const;

 private:
  struct Heard {
    ChannelEpoch epoch;
    std::uint64_t last = 0;
  };

  std::size_t channel_count_max_;
  std::map<std::string, Heard> channels_;
  std::uint64_t count_ = 0;
};

}  // namespace tensorbus::agent
