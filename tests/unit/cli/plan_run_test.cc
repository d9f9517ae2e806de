#include "tensorbus/cli/plan_run.h"

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sstream>
#include <unistd.h>

#include <nlohmann/json.hpp>

namespace tensorbus::cli {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr const char* kSource = R"json({"format": "tensorbus-layout-1", "ranks": 2, "tensors": [
  {"name": "a", "dtype": "f32", "shape": [8], "mesh": [["x", 2]], "placements": ["Shard(0)"]
},
  {"name": "s", "dtype": "f32", "shape": [], "mesh": [["x", 2]], "placements": ["Replicate"]}]
})json";
constexpr const char* kTarget = R"json({"format": "tensorbus-layout-1", "ranks": 1, "tensors": [
  {"name": "a", "dtype": "f32", "shape": [8], "boxes": [[[[2, 6]]]]},
  {"name": "s", "dtype": "f32", "shape": [], "boxes": [[[]]]}]})json";

class PlanRunTest : public ::testing::Test {
 protected:
  PlanRunTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("tensorbus-plan-" + std::to_string(getpid()))) {
    std::filesystem::create_directory(folder_);
    options_.transfer.source = Write("a.json", kSource);
    options_.transfer.target = Write("b.json", kTarget);
    options_.json = true;
  }
  ~PlanRunTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  /// Runs and returns the exit code; what it printed is kept.
  int Run() {
    std::ostringstream out;
    std::ostringstream err;
    const int code = RunPlan(options_, out, err);
    err_ = err.str();
    json_ = out.str().empty() ? Json() : Json::parse(out.str());
    return code;
  }

  std::filesystem::path folder_;
  PlanOptions options_;
  Json json_;
  std::string err_;
};

TEST_F(PlanRunTest, ReportsTheFiguresOfTwoFiles) {
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["tensors"], 2);
  EXPECT_EQ(json_["unique_bytes"], 20);
  EXPECT_EQ(json_["recv_bytes"], Json::array({20}));
  EXPECT_EQ(json_["relay_bytes"], Json::array({0}));
  EXPECT_EQ(json_["node_in_bytes"], Json::array({20}));
  EXPECT_EQ(json_["lower_bound_bytes"], 20);
  EXPECT_EQ(json_["rounds"], 2);
  EXPECT_EQ(json_["certificate"]["valid"], true);
  EXPECT_EQ(json_["certificate"]["bytes"], 20);
  EXPECT_EQ(json_["digest"].get<std::string>().size(), 32U);
  EXPECT_THAT(err_, HasSubstr("2->1"));
  options_.json = false;
  EXPECT_EQ(Run(), 0);
  EXPECT_TRUE(json_.is_null());
}

TEST_F(PlanRunTest, WritesOneOpALine) {
  options_.ops = folder_ / "ops";
  ASSERT_EQ(Run(), 0);
  std::ifstream file(folder_ / "ops");
  std::string line;
  ASSERT_TRUE(std::getline(file, line));
  EXPECT_EQ(line, R"json({"tensor": "a", "source": 0, "target": 0, "box": [[2, 4]]})json");
  options_.ops = folder_ / "no" / "ops";
  EXPECT_NE(Run(), 0);
  EXPECT_THAT(json_["error"]["message"], HasSubstr("no/ops"));
}

/// One source, two targets that need all it has.
constexpr const char* kOneSource = R"json({"format": "tensorbus-layout-1", "ranks": 1, "tensors": [
  {"name": "a", "dtype": "f32", "shape": [8], "boxes": [[[[0, 8]]]]}]})json";
constexpr const char* kTwoCopies = R"json({"format": "tensorbus-layout-1", "ranks": 2, "tensors": [
  {"name": "a", "dtype": "f32", "shape": [8], "boxes": [[[[0, 8]]], [[[0, 8]]]]}]})json";

TEST_F(PlanRunTest, RelaysWhereAskedForAndWhereTheyPay) {
  options_.transfer.source = Write("a.json", kOneSource);
  options_.transfer.target = Write("b.json", kTwoCopies);
  options_.ops = folder_ / "ops";
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["relays"], "off");
  EXPECT_EQ(json_["send_bytes"], Json::array({64}));
  EXPECT_EQ(json_["lower_bound_bytes"], 64);
  options_.relays = "on";
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["relays"], "on");
  EXPECT_EQ(json_["send_bytes"], Json::array({32}));
  EXPECT_EQ(json_["recv_bytes"], Json::array({32, 32}));
  EXPECT_EQ(json_["node_in_bytes"], Json::array({32}));
  EXPECT_EQ(json_["max_send_bytes"], 32);
  EXPECT_EQ(json_["lower_bound_bytes"], 32);
  std::ifstream file(folder_ / "ops");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  EXPECT_THAT(lines, ::testing::UnorderedElementsAre(
                         ::testing::ContainsRegex(R"("source": 0, "target": ., "round": 0, "box")"),
                         ::testing::ContainsRegex(R"("relay_from": ., "target": ., "round": 1)")));
  options_.relays = "auto";
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["relays"], "on");
  EXPECT_THAT(json_["relays_why"], HasSubstr("64 bytes without relays and 32 with them"));
  // Two sources with half each: nothing to gain.
  options_.transfer.source = Write("a.json", kSource);
  options_.transfer.target = Write("b.json", kTarget);
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["relays"], "off");
}

TEST_F(PlanRunTest, ExplainsOneTensor) {
  options_.explain = "a";
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["explain"]["ops"].size(), 2U);
  EXPECT_THAT(err_, HasSubstr("target    0 <- source    1"));
  EXPECT_EQ(json_["explain"]["ops"][0]["holders"], Json::array({0}));
  EXPECT_EQ(json_["explain"]["ops"][0]["why"], "the only holder");
  options_.explain = "s";  // whole on both sources
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["explain"]["ops"][0]["holders"], Json::array({0, 1}));
  EXPECT_THAT(json_["explain"]["ops"][0]["why"].get<std::string>(),
              HasSubstr("one of 2 holders, by load"));
  options_.transfer.topology =
      Write("t.json", R"json({"nodes": [{"source": [1], "target": [0]}]})json");
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["explain"]["ops"][0]["why"], "the only one of 2 holders on its node");
  options_.transfer.topology = Write("t.json", R"json({"same_device": [[1, 0]]})json");
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["explain"]["ops"][0]["why"], "already on its device");
  options_.explain = "z";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("no tensor of the name 'z'"));
}

TEST_F(PlanRunTest, DrawsAPage) {
  options_.html = folder_ / "page.html";
  ASSERT_EQ(Run(), 0);
  std::ifstream file(folder_ / "page.html");
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(page, HasSubstr("source 1 → target 0: 12 B"));
  EXPECT_THAT(page, HasSubstr("<h2>Rounds</h2>"));
  EXPECT_THAT(page, HasSubstr(json_["digest"].get<std::string>()));
}

TEST_F(PlanRunTest, TopologyMakesCopiesLocal) {
  options_.transfer.topology = Write("t.json", R"json({"nodes": [{"source": [0, 1], "target": [0]}],
                                          "same_device": [[1, 0]]})json");
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["local_bytes"], Json::array({12}));
  EXPECT_EQ(json_["node_in_bytes"], Json::array({0}));
  options_.transfer.topology = Write("t.json", R"json({"same_device": [[2, 0]]})json");
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("source rank 2"));
  options_.transfer.topology = Write("t.json", R"json({"nodes": 3})json");
  EXPECT_EQ(Run(), 2);
}

TEST_F(PlanRunTest, APlanThatCannotBeExitsWithOneAndDetails) {
  options_.transfer.target =
      Write("b.json", R"json({"format": "tensorbus-layout-1", "ranks": 1, "tensors": [
    {"name": "aa", "dtype": "f32", "shape": [8], "boxes": [[[[2, 6]]]]}]})json");
  EXPECT_EQ(Run(), 1);
  EXPECT_EQ(json_["error"]["reason"], "unknown_tensor");
  EXPECT_EQ(json_["error"]["tensor"], "aa");
  EXPECT_EQ(json_["error"]["candidates"], Json({"a"}));

  options_.transfer.target = Write("b.json", kTarget);
  options_.transfer.source =
      Write("a.json", R"json({"format": "tensorbus-layout-1", "ranks": 2, "tensors": [
    {"name": "a", "dtype": "f32", "shape": [8], "boxes": [[[[0, 3]]], [[[4, 8]]]]},
    {"name": "s", "dtype": "f32", "shape": [], "boxes": [[[]], []]}]})json");
  EXPECT_EQ(Run(), 1);
  EXPECT_EQ(json_["error"]["code"], "FAILED_PRECONDITION");
  EXPECT_EQ(json_["error"]["reason"], "no_holder");
  EXPECT_EQ(json_["error"]["rank"], 0);
  EXPECT_EQ(json_["error"]["box"], Json::parse("[[3, 4]]"));
  EXPECT_EQ(json_["error"]["candidates"], Json::array({0, 1}));
}

TEST_F(PlanRunTest, BadInputAndUsageExitWithTwo) {
  options_.transfer.source = Write("a.json", "{");
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(json_["error"]["message"], HasSubstr("a.json"));
  options_.transfer.source = folder_ / "none";
  EXPECT_EQ(Run(), 2);
  options_.transfer.source.clear();
  EXPECT_EQ(Run(), 2);
  options_.transfer.target.clear();
  EXPECT_EQ(Run(), 2);
  options_.relays = "maybe";
  EXPECT_EQ(Run(), 2);
}

TEST_F(PlanRunTest, SaysHowTransportsWouldMoveTheRoutes) {
  options_.costs = TENSORBUS_MANIFESTS "/../constants/transports.json";
  ASSERT_EQ(Run(), 0);
  ASSERT_TRUE(json_["windows"].contains("tcp"));
  ASSERT_TRUE(json_["windows"].contains("nccl"));
  for (const Json& transport : json_["windows"]) {
    int routes = 0;
    int bytes = 0;
    for (const Json& kind : transport) {
      routes += kind["routes"].get<int>();
      bytes += kind["bytes"].get<int>();
    }
    EXPECT_EQ(routes, 2);
    EXPECT_EQ(bytes, 20);
  }
  const auto refuses = [&](const std::string& text, const char* what) {
    options_.costs = Write("costs.json", text);
    EXPECT_EQ(Run(), 2);
    EXPECT_THAT(err_, HasSubstr(what));
  };
  const std::string rest =
      R"json("pack_bytes_per_us": 1, "window_bytes": 1, "window_ns": 0, "run_ns": 0,
             "descriptor_ns": 0, "row_ns": 0, "strided": false})json";
  const std::string good = R"json({"name": "a", "bytes_per_us": 1, )json" + rest;
  refuses(R"json({"transports": [{"name": "a", "bytes_per_us": 0, )json" + rest + "]}",
          "transport 0: field 'bytes_per_us': must not be 0");
  refuses(R"json({"transports": [)json" + good + ", " + good + "]}", "'a' is there already");
  refuses(R"json({"transports": [{"name": "a"}]})json", "bytes_per_us");
}

/// The layouts file that is shipped.
class ScenarioTest : public PlanRunTest {
 protected:
  ScenarioTest() {
    options_.transfer.source.clear();
    options_.transfer.target.clear();
    options_.transfer.layouts = TENSORBUS_MANIFESTS "/layouts.json";
  }
};

TEST_F(ScenarioTest, FindsScenariosByPrefix) {
  options_.transfer.scenario = "T05";
  ASSERT_EQ(Run(), 0);
  EXPECT_EQ(json_["scenario"], "T05-megatron-tp4-over-2-kv-groups");
  options_.transfer.scenario = "T1";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("ambiguous"));
  EXPECT_THAT(err_, HasSubstr("T13-uneven-fsdp3-over-tp4"));
  options_.transfer.scenario = "T99";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("near: T01"));
}

TEST_F(ScenarioTest, AModelAndTwoLayoutsAreTheScenario) {
  options_.transfer.scenario = "T01";
  ASSERT_EQ(Run(), 0);
  const Json digest = json_["digest"];
  options_.transfer.scenario.clear();
  options_.transfer.model = "tiny-dense";
  options_.transfer.from = "fsdp:shard=3";
  options_.transfer.to = "vllm:tp=2";
  ASSERT_EQ(Run(), 0) << err_;
  EXPECT_EQ(json_["digest"], digest);
  EXPECT_EQ(json_["model"], "tiny-dense");
  EXPECT_EQ(json_["to"], "vllm:tp=2");
  options_.transfer.to = "vllm:tp=3";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("tp=3 does not divide the 8 attention heads"));
  options_.transfer.model = "tiny-dens";
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("near: 'tiny-dense'"));
  options_.transfer.to.clear();
  EXPECT_EQ(Run(), 2);
  EXPECT_THAT(err_, HasSubstr("belong together"));
}

/// Every tiny scenario against the figures computed by three independent programs.
TEST_F(ScenarioTest, TinyScenariosAgreeWithTheReference) {
  std::ifstream file(TENSORBUS_MANIFESTS "/expected_bytes.json");
  const Json expected = Json::parse(file);
  int checked = 0;
  for (const auto& [id, want] : expected.items()) {
    if (id[0] != 'T') continue;
    options_.transfer.scenario = id;
    ASSERT_EQ(Run(), 0) << id << err_;
    EXPECT_EQ(json_["unique_bytes"], want["unique_bytes"]) << id;
    EXPECT_EQ(json_["recv_bytes"], want["recv_min"]) << id;
    EXPECT_EQ(json_["local_bytes"], want["local_bytes"]) << id;
    const std::uint64_t numerator = want["send_minmax_p2p"][0].get<std::uint64_t>();
    const std::uint64_t denominator = want["send_minmax_p2p"][1].get<std::uint64_t>();
    const std::uint64_t recv = *std::max_element(want["recv_min"].begin(), want["recv_min"].end());
    EXPECT_EQ(json_["lower_bound_bytes"],
              std::max(recv, (numerator + denominator - 1) / denominator))
        << id;
    ++checked;
  }
  EXPECT_EQ(checked, 13);
}

}  // namespace
}  // namespace tensorbus::cli
