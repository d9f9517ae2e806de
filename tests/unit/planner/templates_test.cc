#include "planner/templates.h"

#include "planner/axis_rules.h"
#include "planner/name_class.h"
#include "tensorbus/formats/layout_book_file.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsStatus;

IntervalList KeepOf(const char* rule, std::uint64_t n, std::uint64_t size, std::uint64_t coordinate,
                    QkvRole role = QkvRole::kQuery) {
  const ModelNumbers model = {.head_dim = 2, .heads = 4, .kv_heads = 2, .experts = 0, .layers = 0};
  return Keep(ParseAxisRule(rule).value(), {{0, n}}, size, coordinate, model, role).value();
}

TEST(AxisRules, EachKindKeepsWhatItsDefinitionSays) {
  EXPECT_THAT(KeepOf("S0", 10, 8, 4), ElementsAre(Range{8, 10}));
  EXPECT_TRUE(KeepOf("S0", 10, 8, 5).empty());
  EXPECT_THAT(KeepOf("EVEN0", 12, 3, 1), ElementsAre(Range{4, 8}));
  EXPECT_THAT(KeepOf("V0:4", 13, 2, 1), ElementsAre(Range{8, 13}));  // padded to 16, clipped
  EXPECT_THAT(KeepOf("KV0", 4, 4, 1), ElementsAre(Range{0, 2}));     // 2 heads, 2 copies each
  EXPECT_THAT(KeepOf("KV0", 8, 2, 1), ElementsAre(Range{4, 8}));
  EXPECT_THAT(KeepOf("G0:3", 15, 2, 1), ElementsAre(Range{9, 15}));
  EXPECT_THAT(KeepOf("SEG0:3", 12, 2, 1), ElementsAre(Range{2, 4}, Range{6, 8}, Range{10, 12}));
  EXPECT_THAT(KeepOf("X0", 7, 3, 0), ElementsAre(Range{0, 3}));
  // Packed rows [q q k v][q q k v] of 2: rank 1 of 4 has rows 4..8, the k and v of group 0.
  EXPECT_TRUE(KeepOf("MQKV0", 8, 4, 1, QkvRole::kQuery).empty());
  EXPECT_THAT(KeepOf("MQKV0", 4, 4, 1, QkvRole::kKey), ElementsAre(Range{0, 2}));
  EXPECT_THAT(KeepOf("MQKV0", 4, 4, 1, QkvRole::kValue), ElementsAre(Range{0, 2}));
  EXPECT_THAT(KeepOf("MQKV0", 8, 4, 2, QkvRole::kQuery), ElementsAre(Range{4, 8}));
}

TEST(AxisRules, RefusesWhatDoesNotParseOrDivide) {
  for (const char* bad : {"", "S", "S9", "Sx", "EVEN0:2", "V0", "V0:0", "V0:x", "R0", "PP1", "Q0",
                          "S0:", "S-1", "E:1"}) {
    EXPECT_THAT(ParseAxisRule(bad), IsStatus(Code::kInvalidArgument, Reason::kMalformed)) << bad;
  }
  const auto misfit = [](const char* rule, std::uint64_t n, std::uint64_t size) {
    return Keep(ParseAxisRule(rule).value(), {{0, n}}, size, 0, {}, QkvRole::kQuery).status();
  };
  for (const auto& status :
       {misfit("EVEN0", 7, 2), misfit("KV0", 8, 2), misfit("G0:4", 6, 2), misfit("SEG0:4", 6, 2),
        misfit("SEG0:3", 9, 2), misfit("V0:3", 7, 2), misfit("MQKV0", 8, 2)}) {
    EXPECT_THAT(status, IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  }
}

TEST(VllmStages, PutsTheRestBeforeTheLast) {
  EXPECT_THAT(VllmStages(94, 4).value(), ElementsAre(23, 24, 24, 23));
  EXPECT_THAT(VllmStages(7, 4).value(), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(VllmStages(3, 2).value(), ElementsAre(2, 1));
  EXPECT_FALSE(VllmStages(3, 0).ok());
  EXPECT_FALSE(VllmStages(3, 4).ok());
}

TEST(NamePattern, RemembersOnlyWhatNumbersCannotChange) {
  const std::string name = "model.layers.61.mlp.experts.7.w1.weight";
  EXPECT_EQ(PlainName(name), "model.layers.0.mlp.experts.0.w1.weight");
  EXPECT_EQ(PlainName("visual.merger.mlp.2.weight"), "visual.merger.mlp.2.weight");
  for (const char* plain : {"experts\\.\\d+\\.(gate_proj|up_proj|w1|w3)\\.", "^lm_head\\.weight$",
                            "(^visual\\.merger\\.mlp\\.2|mlp\\.fc2)\\."}) {
    EXPECT_TRUE(NamePattern::Create(plain).value().plain()) << plain;
  }
  for (const char* reads : {"^model\\.layers\\.61\\.", "layers\\.(6|7)\\.", "layers\\.\\d\\.",
                            "layers\\.[0-4]\\.", "layers.{2,3}x", "\\.\\d\\d\\.", "6"}) {
    EXPECT_FALSE(NamePattern::Create(reads).value().plain()) << reads;
  }
  const NamePattern last = NamePattern::Create("^model\\.layers\\.61\\.").value();
  EXPECT_TRUE(last.Found(name));
  EXPECT_FALSE(last.Found("model.layers.60.mlp.experts.7.w1.weight"));
  EXPECT_THAT(NamePattern::Create("(").status().message(), HasSubstr("bad expression '('"));
  EXPECT_FALSE(NamePattern::Create(std::string(5000, 'a')).ok());
}

TEST(StageOf, FollowsLayersAndClasses) {
  const std::vector<std::uint32_t> stages = {1, 2};
  EXPECT_EQ(StageOf("model.layers.0.x", "q", stages).value(), 0U);
  EXPECT_EQ(StageOf("model.layers.2.x", "q", stages).value(), 1U);
  EXPECT_EQ(StageOf("language_model.model.layers.1.x", "q", stages).value(), 1U);
  EXPECT_EQ(StageOf("model.layers.9.x", "mtp_embed", stages).value(), 1U);
  EXPECT_EQ(StageOf("lm_head.weight", "head", stages).value(), 1U);
  EXPECT_EQ(StageOf("model.norm.weight", "norm", stages).value(), 1U);
  EXPECT_EQ(StageOf("model.embed_tokens.weight", "embed", stages).value(), 0U);
  EXPECT_FALSE(StageOf("a", "q", {}).ok());
}

/// A tiny book: two experts over ep, rows of 'w' over tp.
LayoutBook Book() {
  return formats::ParseLayoutBook(R"({"format": "tensorbus-layouts/1",
    "classes": [["expert", "experts\\.\\d+\\."], ["w", "w"]],
    "layouts": {"l": {"meshes": {"dense": [["tp", 0]], "expert": [["ep", 2]]},
      "rules": [["expert", "expert", [["ep", "E"]]], ["w", "dense", [["tp", "V0:$pad"]]]]}},
    "scenarios": []})")
      .value();
}

Manifest Model() {
  Manifest manifest;
  manifest.config = {{"experts", 3}};
  for (const char* name : {"w", "experts.0.w", "experts.1.w", "experts.2.w"})
    manifest.tensors.push_back({name, DType::kF32, MakeShape({5})});
  return manifest;
}

TEST(ResolveTemplate, PlacesExpertsByNameAndRowsByRule) {
  TemplateUse use;
  use.layout = "l";
  use.size = {{"tp", 2}};
  use.param = {{"pad", "4"}};
  use.drop = "experts\\.1";
  ASSERT_OK_AND_ASSIGN(const JobLayout layout, ResolveTemplate(Book(), use, Model()));
  EXPECT_OK(Validate(layout));
  ASSERT_EQ(layout.tensors.size(), 3U);
  const Holding& w = layout.HoldingOf(layout.tensors[0]);
  EXPECT_EQ(w.ranks[1].boxes[0], MakeBox({{4, 5}}));
  EXPECT_EQ(layout.HoldingOf(layout.tensors[1]).ranks[0].rank, 0U);
  EXPECT_EQ(layout.HoldingOf(layout.tensors[2]).ranks[0].rank, 1U);
}

TEST(ResolveTemplate, RefusesEachFaultByName) {
  const auto fault = [](auto change) {
    LayoutBook book = Book();
    Manifest model = Model();
    TemplateUse use;
    use.layout = "l";
    use.size = {{"tp", 2}};
    use.param = {{"pad", "4"}};
    change(book, use, model);
    return ResolveTemplate(book, use, model).status();
  };
  using B = LayoutBook;
  using U = TemplateUse;
  using M = Manifest;
  EXPECT_OK(fault([](B&, U&, M&) {}));
  EXPECT_THAT(fault([](B&, U& use, M&) { use.layout = "k"; }).message(), HasSubstr("there are l"));
  EXPECT_THAT(fault([](B&, U& use, M&) { use.size.clear(); }).message(),
              HasSubstr("size of axis 'tp' is not given"));
  EXPECT_THAT(fault([](B&, U& use, M&) { use.size["tp"] = 3; }).message(),
              HasSubstr("differ in ranks"));
  EXPECT_THAT(fault([](B&, U& use, M&) { use.param.clear(); }).message(),
              HasSubstr("needs a param"));
  EXPECT_THAT(fault([](B&, U& use, M&) { use.param["pad"] = "5"; }).message(),
              HasSubstr("tensor 'w'"));
  EXPECT_THAT(fault([](B&, U&, M& model) { model.config.clear(); }).message(),
              HasSubstr("tensor 'experts.0.w'"));
  EXPECT_THAT(fault([](B&, U&, M& model) { model.tensors[0].name = "x"; }).message(),
              HasSubstr("no class"));
  EXPECT_THAT(fault([](B& book, U&, M&) { book.layouts["l"].rules.pop_back(); }).message(),
              HasSubstr("class 'w' has no rule"));
  EXPECT_THAT(fault([](B& book, U&, M&) { book.layouts["l"].rules[0].mesh = "m"; }).message(),
              HasSubstr("no mesh 'm'"));
  EXPECT_THAT(fault([](B& book, U&, M&) {
                book.layouts["l"].rules[0].placements[0].first = "x";
              }).message(),
              HasSubstr("no axis 'x'"));
  EXPECT_THAT(fault([](B& book, U&, M&) { book.classes[0].second = "["; }).message(),
              HasSubstr("bad expression"));
}

}  // namespace
}  // namespace tensorbus::planner
