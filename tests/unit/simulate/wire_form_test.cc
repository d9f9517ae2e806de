#include "simulate/wire_form.h"

#include "tensorbus/formats/manifest_file.h"
#include "tests/testing/sanitized.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::simulate {
namespace {

using planner::MakeBox;

/// A bf16 checkpoint on the fp8 wire has the bytes of the published fp8 checkpoint, tensor by
/// tensor: a matrix is its fp8 form and its scales.
TEST(WireForm, GivesThePublishedFp8Checkpoints) {
  for (const char* name : {"deepseek-v3", "kimi-k2"}) {
    const std::string path = std::string(TENSORBUS_MANIFESTS "/") + name;
    if (testing::kSanitized && name == std::string("kimi-k2")) continue;  // minutes, the same form
    ASSERT_OK_AND_ASSIGN(const Manifest wide, formats::ReadManifest(path + "-bf16.json.gz"));
    ASSERT_OK_AND_ASSIGN(const Manifest published, formats::ReadManifest(path + "-fp8.json.gz"));
    std::map<std::string, std::uint64_t> bytes;
    for (const TensorSpec& spec : published.tensors) bytes[spec.name] = spec.bytes();
    std::uint64_t sum = 0;
    for (const TensorSpec& spec : wide.tensors) {
      const auto scales = bytes.find(spec.name + "_scale_inv");
      ASSERT_EQ(IsQuantised(spec), scales != bytes.end()) << spec.name;
      std::uint64_t travels = spec.bytes();
      if (IsQuantised(spec)) {
        ASSERT_EQ(ScaleBytes(Box::Whole(spec.shape)), scales->second) << spec.name;
        travels = spec.shape.elements() + scales->second;
      }
      ASSERT_EQ(travels, bytes.at(spec.name) + (scales == bytes.end() ? 0 : scales->second))
          << spec.name;
      sum += travels;
    }
    std::uint64_t all = 0;
    for (const auto& [tensor, size] : bytes) all += size;
    EXPECT_EQ(sum, all);
  }
}

TEST(WireForm, CountsEveryBlockThatABoxTouches) {
  EXPECT_EQ(ScaleBytes(MakeBox({{0, 128}, {0, 128}})), 4U);
  EXPECT_EQ(ScaleBytes(MakeBox({{127, 129}, {0, 1}})), 8U);
  EXPECT_EQ(ScaleBytes(MakeBox({{0, 3}, {100, 200}, {128, 384}})), 3U * 2 * 2 * 4);
}

TEST(WireForm, LeavesOtherTensorsAlone) {
  const auto spec = [](const char* name, DType dtype, std::initializer_list<std::uint64_t> dims) {
    return TensorSpec{name, dtype, Shape::Create(std::span(dims.begin(), dims.size())).value()};
  };
  EXPECT_TRUE(
      IsQuantised(spec("model.layers.0.self_attn.q_proj.weight", DType::kBf16, {256, 256})));
  EXPECT_TRUE(
      IsQuantised(spec("model.layers.0.mlp.experts.gate_up_proj", DType::kBf16, {2, 256, 256})));
  EXPECT_FALSE(IsQuantised(spec("model.layers.0.self_attn.q_proj.bias", DType::kBf16, {256})));
  EXPECT_FALSE(
      IsQuantised(spec("model.layers.0.self_attn.q_proj.weight", DType::kF8e4m3, {256, 256})));
  EXPECT_FALSE(IsQuantised(spec("visual.blocks.0.mlp.up_proj.weight", DType::kBf16, {256, 256})));
  EXPECT_FALSE(IsQuantised(spec("model.embed_tokens.weight", DType::kBf16, {256, 256})));
  JobLayout layout;
  layout.tensors.push_back({spec("a.q_proj.weight", DType::kBf16, {2, 2}), 0});
  layout.tensors.push_back({spec("b", DType::kBf16, {2, 2}), 0});
  EXPECT_TRUE(QuantisedTensors(layout, WireForm::kAsIs).empty());
  EXPECT_EQ(QuantisedTensors(layout, WireForm::kFp8Block), (std::vector<bool>{true, false}));
  EXPECT_EQ(OnWire(layout, WireForm::kFp8Block).tensors[0].spec.dtype, DType::kF8e4m3);
  EXPECT_EQ(OnWire(layout, WireForm::kFp8Block).tensors[1].spec.dtype, DType::kBf16);
  EXPECT_EQ(OnWire(layout, WireForm::kAsIs), layout);
}

}  // namespace
}  // namespace tensorbus::simulate
