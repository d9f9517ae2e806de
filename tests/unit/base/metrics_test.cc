#include "tensorbus/base/metrics.h"

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Metrics, OneNameAndLabelsAreOneSeries) {
  Metrics metrics;
  metrics.AddCounter("tensorbus_test_bytes_total", "Bytes.", {{"transport", "shm"}}).Add(5);
  metrics.AddCounter("tensorbus_test_bytes_total", "Bytes.", {{"transport", "shm"}}).Add(2);
  metrics.AddCounter("tensorbus_test_bytes_total", "Bytes.", {{"transport", "tcp"}}).Increment();
  EXPECT_THAT(metrics.Text(), HasSubstr("tensorbus_test_bytes_total{transport=\"shm\"} 7"));
  EXPECT_THAT(metrics.Text(), HasSubstr("tensorbus_test_bytes_total{transport=\"tcp\"} 1"));
}

TEST(Metrics, ListsItsFamiliesInOrder) {
  Metrics metrics;
  metrics.AddHistogram("tensorbus_test_seconds", "Time.", {0.1, 1}).Observe(0.5);
  metrics.AddGauge("tensorbus_test_open", "Open.").Set(3);
  EXPECT_THAT(metrics.Names(), ElementsAre("tensorbus_test_open", "tensorbus_test_seconds"));
}

TEST(Metrics, AGaugeWithAReaderIsReadWhenThePageIsMade) {
  Metrics metrics;
  const auto peak = std::make_shared<double>(1);
  metrics.AddGauge("tensorbus_test_peak_bytes", "Peak.", [peak] { return *peak; });
  *peak = 4096;
  EXPECT_THAT(metrics.Text(), HasSubstr("# TYPE tensorbus_test_peak_bytes gauge\n"
                                        "tensorbus_test_peak_bytes 4096\n"));
  EXPECT_THAT(metrics.Names(), ElementsAre("tensorbus_test_peak_bytes"));
}

TEST(Metrics, ListensOnAPortTheSystemPicks) {
  Metrics metrics;
  ASSERT_OK_AND_ASSIGN(const int port, metrics.Listen("127.0.0.1:0"));
  EXPECT_GT(port, 0);
}

TEST(Metrics, AnAddressThatCannotBeServedIsNamed) {
  Metrics metrics;
  const auto port = metrics.Listen("203.0.113.1:1");
  ASSERT_FALSE(port.ok());
  EXPECT_THAT(port.status().message(), HasSubstr("203.0.113.1:1"));
}

}  // namespace
}  // namespace tensorbus
