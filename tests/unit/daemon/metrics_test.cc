#include <fstream>
#include <gtest/gtest.h>
#include <set>

#include "tensorbus/daemon/daemon_metrics.h"

namespace tensorbus::daemon {
namespace {

TEST(DaemonMetrics, AreTheOnesTheDocumentationLists) {
  std::ifstream page(TENSORBUS_METRICS_PAGE);
  ASSERT_TRUE(page) << TENSORBUS_METRICS_PAGE;
  std::set<std::string> listed;
  for (std::string line; std::getline(page, line);) {
    const std::string prefix = "| `tensorbus_daemon_";
    if (!line.starts_with(prefix)) continue;
    listed.insert(line.substr(3, line.find('`', 3) - 3));
  }
  Metrics registry;
  const DaemonMetrics metrics(registry);
  const auto names = registry.Names();
  EXPECT_EQ(listed, std::set<std::string>(names.begin(), names.end()));
}

}  // namespace
}  // namespace tensorbus::daemon
