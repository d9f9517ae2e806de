#include "agent/channel_epochs.h"

#include <algorithm>
#include <fmt/format.h>

namespace tensorbus::agent {

Status ChannelEpochs::Accept(const std::string& channel, ChannelEpoch epoch) {
  const auto known = channels_.find(channel);
  if (known != channels_.end() && epoch < known->second.epoch) {
    return {Code::kFailedPrecondition,
            fmt::format("channel {} is in epoch {} for the daemon, but was in epoch {} before, and "
                        "versions of an older epoch are never accepted again; make sure that one "
                        "tensorbusd serves the channel, and restart it: it goes on from the "
                        "greatest epoch its agents know",
                        channel, epoch.value, known->second.epoch.value),
            Reason::kStaleVersion};
  }
  channels_[channel] = {.epoch = epoch, .last = ++count_};
  if (channels_.size() > channel_count_max_) {
    channels_.erase(std::min_element(
        channels_.begin(), channels_.end(),
        [](const auto& a, const auto& b) { return a.second.last < b.second.last; }));
  }
  return {};
}

ChannelEpoch ChannelEpochs::Highest(const std::string& channel) const {
  const auto known = channels_.find(channel);
  return known == channels_.end() ? ChannelEpoch{} : known->second.epoch;
}

}  // namespace tensorbus::agent
