#include "planner/template_use.h"

#include "planner/templates.h"
#include "tensorbus/formats/layout_book_file.h"
#include "tensorbus/formats/manifest_file.h"
#include "tests/testing/sanitized.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::planner {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

const LayoutBook& ShippedBook() {
  static const LayoutBook kBook =
      formats::ReadLayoutBook(TENSORBUS_MANIFESTS "/layouts.json").value();
  return kBook;
}

/// Enough of a model for the rules: numbers, no tensors.
Manifest Numbers(std::int64_t heads, std::int64_t experts, std::int64_t layers) {
  Manifest model;
  model.model = std::string("m");
  model.config = {{"heads", heads}, {"layers", layers}};
  if (experts != 0) model.config["experts"] = experts;
  return model;
}

/// How people would say each side of the scenarios on published models.
struct Said {
  const char* scenario;
  const char* from;
  const char* to;
};

TEST(ParseTemplateUse, SaysWhatTheScenariosSay) {
  const Said all[] = {
      {"S01", "fsdp:shard=3", "vllm:tp=2,drop=^lm_head"},
      {"S02", "fsdp:shard=8", "vllm:tp=8"},
      {"S03", "fsdp:shard=8", "vllm:tp=2,replicas=4"},
      {"S04", "hsdp:replicate=2,shard=16", "vllm_tp:tp=8,rep=2"},
      {"S05", "fsdp:shard=8,tp=4", "vllm:tp=4,pp=2,replicas=2"},
      {"S06", "megatron:tp=2,pp=2,dp=4,ep=4", "vllm:tp=8"},
      {"S07", "fsdp:shard=16,ep=8", "vllm:tp=4,ep=4,replicas=2"},
      {"S08", "megatron:tp=4,pp=4,ep=8,dp=8", "vllm:tp=8,dp=2,ep=16,replicas=4"},
      {"S09", "fsdp:shard=32", "vllm:tp=8,dp=4,drop=^model\\.layers\\.61\\."},
      {"S10", "megatron:pp=16,dp=16,ep=16,layers=4+4+4+4+4+4+4+4+4+4+4+4+4+3+3+3",
       "vllm:dp=32,ep=32,replicas=4"},
      {"S11", "megatron:pp=8,dp=32,ep=32,layers=8+8+8+8+8+7+7+7",
       "vllm_tp_dp_ep:tp=8,dp=2,ep=16,rep=8,drop=inv_freq$"},
      {"S12", "fsdp:fsdp=16", "vllm:tp=8,replicas=2"},
      {"S13", "fsdp:replicate=2,shard=7", "vllm:tp=4,replicas=2"},
      {"S14", "fsdp:shard=6", "vllm:tp=4"},
      {"S15", "fsdp:shard=16", "vllm:tp=8,ep=8"},
      {"S16", "fsdp:shard=256,ep=64", "vllm:tp=16,ep=16"},
  };
  for (const Said& said : all) {
    const auto scenario =
        std::find_if(ShippedBook().scenarios.begin(), ShippedBook().scenarios.end(),
                     [&](const Scenario& s) { return s.id.compare(0, 3, said.scenario) == 0; });
    ASSERT_NE(scenario, ShippedBook().scenarios.end()) << said.scenario;
    const std::string path = TENSORBUS_MANIFESTS "/" + scenario->manifest + ".json.gz";
    if (testing::LeftOut(path)) continue;
    const Manifest model = formats::ReadManifest(path).value();
    for (const auto& [text, wanted] :
         {std::pair{said.from, &scenario->source}, {said.to, &scenario->target}}) {
      ASSERT_OK_AND_ASSIGN(const TemplateUse use, ParseTemplateUse(text, ShippedBook(), model));
      ASSERT_OK_AND_ASSIGN(const JobLayout layout, ResolveTemplate(ShippedBook(), use, model));
      ASSERT_OK_AND_ASSIGN(const JobLayout want, ResolveTemplate(ShippedBook(), *wanted, model));
      EXPECT_EQ(HashOf(layout), HashOf(want)) << said.scenario << " " << text;
    }
  }
}

TEST(ParseTemplateUse, KnowsEveryLayoutByItsFullName) {
  const char* all[] = {"fsdp:fsdp=4",
                       "hsdp:dp_replicate=2,fsdp=4",
                       "fsdp_tp:fsdp=2,tp=2",
                       "fsdp_ep:fsdp=4,ep=2",
                       "fsdp_ep_shard1:fsdp=16,ep=4",
                       "megatron:tp=2",
                       "vllm_tp:tp=4",
                       "vllm_tp_pp:tp=2,pp=2",
                       "vllm_tp_ep:tp=4",
                       "vllm_tp_dp_ep:tp=2,dp=2",
                       "vllm_dp_ep:dp=4"};
  std::set<std::string> seen;
  for (const char* text : all) {
    ASSERT_OK_AND_ASSIGN(const TemplateUse use,
                         ParseTemplateUse(text, ShippedBook(), Numbers(8, 8, 4)));
    seen.insert(use.layout);
  }
  EXPECT_EQ(seen.size(), ShippedBook().layouts.size());
}

TEST(ParseTemplateUse, FillsInWhatFollows) {
  ASSERT_OK_AND_ASSIGN(
      const TemplateUse use,
      ParseTemplateUse("megatron:tp=4,pp=4,ep=8,dp=8", ShippedBook(), Numbers(64, 128, 94)));
  EXPECT_EQ(use.size.at("edp"), 4U);
  EXPECT_EQ(use.size.at("etp"), 1U);
  EXPECT_EQ(use.param.at("vpad"), "512");
  EXPECT_EQ(use.pp_layers, (std::vector<std::uint32_t>{23, 24, 24, 23}));
}

TEST(ParseTemplateUse, NamesTheRuleThatDoesNotFit) {
  const auto misfit = [](const char* text, std::int64_t heads, std::int64_t experts,
                         std::int64_t layers) {
    const Status status =
        ParseTemplateUse(text, ShippedBook(), Numbers(heads, experts, layers)).status();
    EXPECT_THAT(status, IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch)) << text;
    return status.message();
  };
  EXPECT_THAT(misfit("vllm:tp=3", 8, 0, 4),
              HasSubstr("tp=3 does not divide the 8 attention heads of m"));
  EXPECT_THAT(misfit("megatron:tp=3", 8, 0, 4), HasSubstr("tp=3 does not divide"));
  EXPECT_THAT(misfit("megatron:ep=3,dp=3", 8, 8, 4),
              HasSubstr("ep=3 does not divide the 8 experts"));
  EXPECT_THAT(misfit("megatron:ep=3,dp=4", 8, 9, 4), HasSubstr("does not divide dp * tp = 4"));
  EXPECT_THAT(misfit("megatron:ep=2,dp=2", 8, 0, 4), HasSubstr("m has no experts"));
  EXPECT_THAT(misfit("megatron:ep=2,dp=2,edp=3", 8, 8, 4), HasSubstr("edp=3"));
  EXPECT_THAT(misfit("megatron:pp=3", 8, 0, 5),
              HasSubstr("pp=3 does not divide the model's 5 layers"));
  EXPECT_THAT(misfit("megatron:pp=2,layers=3+3", 8, 0, 5), HasSubstr("6 layers, m has 5"));
  EXPECT_THAT(misfit("megatron:pp=2,layers=5", 8, 0, 5), HasSubstr("1 stages are given, pp=2"));
  EXPECT_THAT(misfit("vllm:tp=4,ep=8", 8, 8, 4), HasSubstr("ep=8"));
  EXPECT_THAT(misfit("vllm:tp=4,dp=2,ep=4", 8, 8, 4), HasSubstr("= 8 is needed"));
  EXPECT_THAT(misfit("fsdp:shard=6,ep=4", 8, 8, 4), HasSubstr("ep=4 does not divide fsdp = 6"));
  EXPECT_THAT(misfit("fsdp_ep:fsdp=16,ep=4", 8, 8, 4), HasSubstr("fsdp_ep_shard1"));
  EXPECT_THAT(misfit("megatron:tp=65536,dp=65536", 65536, 0, 4), HasSubstr("ranks"));
}

TEST(ParseTemplateUse, NamesWhatItCannotRead) {
  const auto fault = [](const char* text) {
    const Status status = ParseTemplateUse(text, ShippedBook(), Numbers(8, 8, 4)).status();
    EXPECT_THAT(status, IsStatus(Code::kInvalidArgument, Reason::kMalformed)) << text;
    return status.message();
  };
  EXPECT_THAT(fault(""), HasSubstr("no layout ''"));
  EXPECT_THAT(fault("megatrom:tp=2"), HasSubstr("near: 'megatron'"));
  EXPECT_THAT(fault("megatron:tq=2"), HasSubstr("no parameter 'tq'; near: 'tp'"));
  EXPECT_THAT(fault("fsdp:fsdp=2,layers=4"), HasSubstr("no parameter 'layers'"));
  EXPECT_THAT(fault("vllm:tp"), HasSubstr("NAME=VALUE"));
  EXPECT_THAT(fault("vllm:=2"), HasSubstr("NAME=VALUE"));
  EXPECT_THAT(fault("vllm:tp=2,tp=4"), HasSubstr("'tp' is given twice"));
  EXPECT_THAT(fault("vllm:rep=2,replicas=4"), HasSubstr("'rep' is given twice"));
  EXPECT_THAT(fault("vllm:tp=0"), HasSubstr("tp=0"));
  EXPECT_THAT(fault("vllm:tp=-1"), HasSubstr("tp=-1"));
  EXPECT_THAT(fault("vllm:tp=9223372036854775808"), HasSubstr("from 1 to 65536"));
  EXPECT_THAT(fault("vllm:tp=99999999999999999999999"), HasSubstr("from 1 to 65536"));
  EXPECT_THAT(fault("megatron:layers=2++2,pp=2"), HasSubstr("layers="));
}

}  // namespace
}  // namespace tensorbus::planner
