#include "tensorbus/transport/peer_log.h"

#include <gtest/gtest.h>

namespace tensorbus::transport {
namespace {

TEST(PeerLog, HoldsBackWhatExceedsAPeriodAndSaysHowMuch) {
  PeerLog log;
  const TimePoint begin = TimePoint() + std::chrono::hours(1);
  for (std::uint32_t i = 0; i < PeerLog::kLinesMax; ++i) EXPECT_EQ(log.Admit(begin), 0U);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(log.Admit(begin + PeerLog::kPeriod / 2), std::nullopt);
  EXPECT_EQ(log.Admit(begin + PeerLog::kPeriod), 7U);
  EXPECT_EQ(log.Admit(begin + PeerLog::kPeriod), 0U);
}

}  // namespace
}  // namespace tensorbus::transport
