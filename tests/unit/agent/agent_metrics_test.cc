#include <fstream>
#include <gtest/gtest.h>
#include <set>

#include "tests/unit/agent/agent_fixture.h"

namespace tensorbus::agent {
namespace {

using testing::AgentFixture;

class AgentMetrics : public AgentFixture {};

TEST_F(AgentMetrics, AreTheOnesTheDocumentationLists) {
  std::ifstream page(TENSORBUS_METRICS_PAGE);
  ASSERT_TRUE(page) << TENSORBUS_METRICS_PAGE;
  std::set<std::string> listed;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| `tensorbus_agent_")) continue;
    listed.insert(line.substr(3, line.find('`', 3) - 3));
  }
  const auto names = metrics->Names();
  EXPECT_EQ(listed, std::set<std::string>(names.begin(), names.end()));
}

TEST_F(AgentMetrics, CountRanksAndBytes) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  const std::string text = metrics->Text();
  EXPECT_NE(text.find("\ntensorbus_agent_moved_bytes_total 6144\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\ntensorbus_agent_ranks_count 4\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace tensorbus::agent
