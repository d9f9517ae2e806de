#include "tensorbus/cli/simulate_run.h"

#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tests/testing/temp_dir.h"

namespace tensorbus::cli {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

class SimulateRunTest : public ::testing::Test {
 protected:
  SimulateRunTest() {
    options_.transfer.layouts = TENSORBUS_MANIFESTS "/layouts.json";
    options_.transfer.scenario = "S01";
    options_.json = true;
  }
  int Run() {
    std::ostringstream out;
    std::ostringstream err;
    const int code = RunSimulate(options_, out, err);
    err_ = err.str();
    json_ = out.str().empty() ? Json() : Json::parse(out.str());
    return code;
  }

  testing::TempDir folder_;
  SimulateOptions options_;
  Json json_;
  std::string err_;
};

TEST_F(SimulateRunTest, PredictsAScenarioCloseToItsBound) {
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_EQ(json_["prediction"], true);
  EXPECT_EQ(json_["cluster"], "h100-8x400g");
  // The busiest target receives 596,115,456 bytes over one rail; two bounds say so.
  EXPECT_THAT(json_["bound"].get<std::string>(), ::testing::AnyOf("rank", "receive"));
  EXPECT_DOUBLE_EQ(json_["bound_seconds"].get<double>(), 596115456 / 50e9);
  EXPECT_GE(json_["ratio"].get<double>(), 1.0);
  EXPECT_LE(json_["ratio"].get<double>(), 1.1);
  EXPECT_EQ(json_["links"][0]["utilisation"].size(), 100U);
  EXPECT_FALSE(json_["critical_path"].empty());
  EXPECT_THAT(err_, HasSubstr("nothing was measured"));
}

TEST_F(SimulateRunTest, TheWireFormHalvesWhatTravels) {
  ASSERT_EQ(Run(), 0);
  const double wide = json_["predicted_seconds"].get<double>();
  options_.wire = "fp8-block";
  ASSERT_EQ(Run(), 0);
  // The embedding, a quarter of this model, stays as it is.
  EXPECT_LT(json_["predicted_seconds"].get<double>(), 0.7 * wide);
  EXPECT_GT(json_["predicted_seconds"].get<double>(), 0.5 * wide);
}

TEST_F(SimulateRunTest, SharingRoundsTakesNoLessTime) {
  ASSERT_EQ(Run(), 0);
  const double by_need = json_["predicted_seconds"].get<double>();
  for (const char* sharing : {"equal", "rounds"}) {
    options_.sharing = sharing;
    ASSERT_EQ(Run(), 0);
    EXPECT_GE(json_["predicted_seconds"].get<double>(), by_need * (1 - 1e-6)) << sharing;
  }
}

TEST_F(SimulateRunTest, RelaysAutoTakesWhatIsPredictedToTakeLess) {
  options_.transfer.scenario = "S13";  // both replicas need the same bytes
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_EQ(json_["relays"], "off");
  EXPECT_FALSE(json_.contains("relays_why"));
  const double direct = json_["predicted_seconds"].get<double>();
  options_.relays = "on";
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_EQ(json_["relays"], "on");
  const double relayed = json_["predicted_seconds"].get<double>();
  EXPECT_LT(relayed, 0.6 * direct);
  EXPECT_LE(json_["ratio"].get<double>(), 1.1);
  options_.relays = "auto";
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_EQ(json_["relays"], "on");
  EXPECT_EQ(json_["predicted_seconds"].get<double>(), relayed);
  EXPECT_THAT(json_["relays_why"].get<std::string>(), HasSubstr("without relays"));
  options_.transfer.scenario = "S01";  // every byte has one target: nothing to gain
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_EQ(json_["relays"], "off");
}

/// The rates of these relays change each other many times. Once each change was an event of its
/// own, and the prediction did not end.
TEST_F(SimulateRunTest, RelaysThatFeedEachOtherEnd) {
  options_.transfer.scenario = "S04";
  options_.relays = "on";
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_LE(json_["ratio"].get<double>(), 1.1);
}

TEST_F(SimulateRunTest, WritesAPageThatSaysItIsAPrediction) {
  options_.html = folder_.Join("page.html");
  ASSERT_EQ(Run(), 0);
  std::ifstream file(options_.html);
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(page, HasSubstr("<b>A prediction</b>"));
  EXPECT_THAT(page, HasSubstr("<polyline"));
  EXPECT_THAT(page, HasSubstr("S01-qwen3-0.6b-fsdp3-tp2"));
  EXPECT_EQ(page.find("http://"), std::string::npos);  // nothing from elsewhere
  EXPECT_EQ(page.find("https://"), std::string::npos);
  options_.html = folder_.Join("no/page.html");
  EXPECT_NE(Run(), 0);
}

TEST_F(SimulateRunTest, ReadsAClusterFromAFile) {
  options_.cluster = folder_.Join("c.json");
  std::ofstream(options_.cluster)
      << R"({"format": "tensorbus-cluster-1", "name": "mine", "nodes": 1,
    "node": {"ranks": 8, "nics": 1, "nic": {"gb_per_s": 1}, "host_memory": {"gb_per_s": 10}}})";
  EXPECT_EQ(Run(), 1);
  EXPECT_THAT(err_, HasSubstr("need 2 nodes"));
  options_.transfer.scenario = "T12";  // colocated: all on one node
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_EQ(json_["cluster"], "mine");
}

TEST_F(SimulateRunTest, BadUsageNamesWhatIsPossible) {
  options_.cluster = "h100";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("gb200-nvl72, h100-8x400g, tcp-pair"));
  options_.cluster = "tcp-pair";
  options_.wire = "fp4";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("as-is, fp8-block"));
  options_.wire = "as-is";
  options_.sharing = "fair";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("remaining, equal, rounds"));
  options_.sharing = "remaining";
  options_.relays = "always";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("off, on, auto"));
}

}  // namespace
}  // namespace tensorbus::cli
