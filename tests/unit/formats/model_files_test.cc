// Tensor lists made from a configuration, and headers of safetensors files.

#include <filesystem>
#include <fstream>

#include "tensorbus/formats/manifest_file.h"
#include "tensorbus/formats/model_config_file.h"
#include "tensorbus/formats/model_tensors.h"
#include "tensorbus/formats/safetensors_file.h"
#include "tests/testing/sanitized.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_dir.h"

namespace tensorbus::formats {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

std::string PathOf(const std::string& name) {
  return TENSORBUS_MANIFESTS "/" + name + ".json.gz";
}

Manifest Shipped(const std::string& name) {
  return ReadManifest(PathOf(name)).value();
}

/// The first tensor in which two lists differ, for a message that can be read.
std::string FirstDifference(const std::vector<TensorSpec>& a, const std::vector<TensorSpec>& b) {
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!(a[i] == b[i])) {
      return a[i].name + " " + a[i].shape.ToString() + " against " + b[i].name + " " +
             b[i].shape.ToString();
    }
  }
  return a.size() == b.size()
             ? ""
             : "lengths " + std::to_string(a.size()) + " and " + std::to_string(b.size());
}

struct Known {
  const char* name;
  ModelFamily family;
  WeightForm form;
};

TEST(TensorsOf, EqualsEveryManifestFromItsOwnConfig) {
  const Known all[] = {
      {"llama-3.1-8b", ModelFamily::kLlama, WeightForm::kPlain},
      {"llama-3.1-70b", ModelFamily::kLlama, WeightForm::kPlain},
      {"qwen3-0.6b", ModelFamily::kLlama, WeightForm::kPlain},
      {"qwen3-8b", ModelFamily::kLlama, WeightForm::kPlain},
      {"qwen3-30b-a3b", ModelFamily::kLlama, WeightForm::kPlain},
      {"qwen3-235b-a22b", ModelFamily::kLlama, WeightForm::kPlain},
      {"mixtral-8x7b", ModelFamily::kLlama, WeightForm::kPlain},
      {"deepseek-v3-bf16", ModelFamily::kDeepseek, WeightForm::kPlain},
      {"deepseek-v3-fp8", ModelFamily::kDeepseek, WeightForm::kFp8Blocks},
      {"kimi-k2-bf16", ModelFamily::kDeepseek, WeightForm::kPlain},
      {"kimi-k2-fp8", ModelFamily::kDeepseek, WeightForm::kFp8Blocks},
      {"gpt-oss-120b-bf16", ModelFamily::kGptOss, WeightForm::kPlain},
      {"gpt-oss-120b-mxfp4", ModelFamily::kGptOss, WeightForm::kMxfp4},
      {"gemma-3-27b", ModelFamily::kGemma3, WeightForm::kPlain},
      {"qwen2.5-vl-7b", ModelFamily::kQwen25Vl, WeightForm::kPlain},
      {"tiny-dense", ModelFamily::kLlama, WeightForm::kPlain},
      {"tiny-moe", ModelFamily::kLlama, WeightForm::kPlain},
      {"tiny-mla", ModelFamily::kDeepseek, WeightForm::kPlain},
      {"tiny-oss", ModelFamily::kGptOss, WeightForm::kMxfp4},
      {"tiny-vl", ModelFamily::kQwen25Vl, WeightForm::kPlain},
  };
  for (const Known& known : all) {
    if (testing::LeftOut(PathOf(known.name))) continue;
    const Manifest manifest = Shipped(known.name);
    ASSERT_OK_AND_ASSIGN(const auto tensors,
                         TensorsOf({known.family, known.form, DType::kBf16, manifest.config}));
    EXPECT_EQ(FirstDifference(tensors, manifest.tensors), "") << known.name;
  }
}

TEST(TensorsOf, RefusesNumbersThatCannotBe) {
  std::map<std::string, std::int64_t> numbers = Shipped("tiny-dense").config;
  const auto fault = [&](const char* key, std::int64_t value) {
    auto changed = numbers;
    changed[key] = value;
    return TensorsOf({ModelFamily::kLlama, WeightForm::kPlain, DType::kBf16, changed}).status();
  };
  EXPECT_THAT(fault("layers", -1).message(), HasSubstr("'layers' is -1"));
  EXPECT_THAT(fault("hidden", 0).message(), HasSubstr("'hidden' is 0"));
  EXPECT_THAT(fault("heads", std::int64_t{1} << 40).message(), HasSubstr("'heads'"));
  EXPECT_THAT(fault("layers", std::int64_t{1} << 31),
              IsStatus(Code::kResourceExhausted, Reason::kUnsupported));
  numbers["vocab"] = numbers["hidden"] = std::int64_t{1} << 31;  // 2^62 elements
  EXPECT_THAT(fault("layers", 1).message(), HasSubstr("tensor 'model.embed_tokens.weight'"));
  numbers.erase("vocab");
  EXPECT_THAT(fault("layers", 1).message(), HasSubstr("'vocab' is not given"));
}

/// Published configurations, the fields that matter; others are there to be skipped.
struct Published {
  const char* manifest;
  const char* config;
};

TEST(ModelConfig, PublishedConfigsGiveTheManifests) {
  const Published all[] = {
      {"llama-3.1-8b",
       R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false,
        "attention_bias": false, "mlp_bias": false, "rope_scaling": {"factor": 8.0},
        "torch_dtype": "bfloat16"})"},
      {"qwen3-8b",
       R"({"model_type": "qwen3", "hidden_size": 4096, "head_dim": 128,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": false,
        "attention_bias": false, "torch_dtype": "bfloat16"})"},
      {"qwen3-30b-a3b", R"({"model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "vocab_size": 151936, "tie_word_embeddings": false})"},
      {"qwen3-235b-a22b", R"({"model_type": "qwen3_moe", "hidden_size": 4096, "head_dim": 128,
        "moe_intermediate_size": 1536, "num_experts": 128, "num_attention_heads": 64,
        "num_hidden_layers": 94, "num_key_value_heads": 4, "vocab_size": 151936,
        "tie_word_embeddings": false})"},
      {"mixtral-8x7b", R"({"model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000,
        "tie_word_embeddings": false, "sliding_window": null})"},
      {"deepseek-v3-fp8",
       R"({"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128,
        "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 129280, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
        "weight_block_size": [128, 128]}})"},
      {"kimi-k2-fp8", R"({"model_type": "kimi_k2", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_attention_heads": 64,
        "num_key_value_heads": 64, "num_hidden_layers": 61, "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 163840, "quantization_config": {"quant_method": "fp8",
        "weight_block_size": [128, 128]}})"},
      {"gpt-oss-120b-mxfp4",
       R"({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088,
        "attention_bias": true, "quantization_config": {"quant_method": "mxfp4"}})"},
      {"gemma-3-27b", R"({"model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {"hidden_size": 5376, "intermediate_size": 21504, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_hidden_layers": 62},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "image_size": 896,
        "patch_size": 14, "num_attention_heads": 16, "num_hidden_layers": 27}})"},
      {"qwen2.5-vl-7b",
       R"({"model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
        "vocab_size": 152064, "vision_config": {"depth": 32, "hidden_size": 1280,
        "intermediate_size": 3420, "out_hidden_size": 3584}})"},
  };
  for (const Published& published : all) {
    if (testing::LeftOut(PathOf(published.manifest))) continue;
    ASSERT_OK_AND_ASSIGN(const ModelDescription model, ParseModelConfig(published.config));
    ASSERT_OK_AND_ASSIGN(const Manifest made, ManifestOf(published.manifest, model));
    const Manifest shipped = Shipped(published.manifest);
    EXPECT_EQ(FirstDifference(made.tensors, shipped.tensors), "") << published.manifest;
    for (const char* number : {"layers", "heads", "kv_heads", "experts"}) {
      const auto found = shipped.config.find(number);
      if (found == shipped.config.end()) continue;
      EXPECT_EQ(made.config.at(number), found->second) << published.manifest << " " << number;
    }
  }
}

TEST(ModelConfig, LeavesATiedHeadOut) {
  ASSERT_OK_AND_ASSIGN(const ModelDescription model,
                       ParseModelConfig(R"({"model_type": "qwen3", "hidden_size": 1024,
        "head_dim": 128, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "vocab_size": 151936,
        "tie_word_embeddings": true})"));
  ASSERT_OK_AND_ASSIGN(const Manifest made, ManifestOf("qwen3-0.6b", model));
  std::vector<TensorSpec> shipped = Shipped("qwen3-0.6b").tensors;
  ASSERT_EQ(shipped.back().name, "lm_head.weight");
  shipped.pop_back();
  EXPECT_EQ(FirstDifference(made.tensors, shipped), "");
}

TEST(ModelConfig, NamesTheFieldOfEachFault) {
  const auto fault = [](const char* text) { return ParseModelConfig(text).status(); };
  EXPECT_THAT(fault("[]").message(), HasSubstr("a model's config: an object"));
  EXPECT_THAT(fault("{}").message(), HasSubstr("'model_type' is missing"));
  EXPECT_THAT(fault(R"({"model_type": "phi3"})"),
              IsStatus(Code::kUnimplemented, Reason::kUnsupported));
  EXPECT_THAT(fault(R"({"model_type": "phi3"})").message(), HasSubstr("folder of its safetensors"));
  EXPECT_THAT(fault(R"({"model_type": "llama"})").message(),
              HasSubstr("'num_hidden_layers' is missing"));
  EXPECT_THAT(fault(R"({"model_type": "llama", "num_hidden_layers": "2"})").message(),
              HasSubstr("'num_hidden_layers': a whole number"));
  EXPECT_THAT(fault(R"({"model_type": "llama", "torch_dtype": "int3"})").message(),
              HasSubstr("'int3'"));
  EXPECT_THAT(fault(
                  R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 7,
        "num_attention_heads": 2, "vocab_size": 5})")
                  .message(),
              HasSubstr("'head_dim' is missing"));
  EXPECT_THAT(fault(
                  R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8,
        "num_attention_heads": 2, "vocab_size": 5, "attention_bias": true})")
                  .message(),
              HasSubstr("'attention_bias'"));
}

class SafetensorsTest : public ::testing::Test {
 protected:
  /// A file whose header and length field are given; data bytes follow.
  std::string Write(const std::string& name, const std::string& header, std::size_t data_bytes) {
    return WriteLength(name, header, header.size(), data_bytes);
  }
  std::string WriteLength(const std::string& name, const std::string& header, std::uint64_t length,
                          std::size_t data_bytes) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream file(path, std::ios::binary);
    for (int i = 0; i < 8; ++i) file.put(static_cast<char>(length >> (8 * i) & 0xFF));
    file << header << std::string(data_bytes, 'x');
    return path;
  }

  testing::TempDir folder_;
};

TEST_F(SafetensorsTest, ReadsTensorsInTheOrderOfTheirData) {
  const std::string path = Write("a.safetensors", R"({"__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}, "c": {"dtype": "BF16",
        "shape": [4], "data_offsets": [0, 8]}})",
                                 32);
  ASSERT_OK_AND_ASSIGN(const auto tensors, ReadSafetensorsHeader(path));
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[0].name, "c");
  EXPECT_EQ(tensors[1].shape.ToString(), "[2, 3]");
}

TEST_F(SafetensorsTest, RefusesHostileHeaders) {
  const auto fault = [](const std::string& path) {
    return ReadSafetensorsHeader(path).status().message();
  };
  EXPECT_THAT(fault(folder_.path() + "/none"), HasSubstr("none"));
  EXPECT_THAT(fault(WriteLength("l", "{}", ~std::uint64_t{0}, 0)), HasSubstr("a header of"));
  EXPECT_THAT(fault(WriteLength("t", "{}", 3, 0)), HasSubstr("truncated"));
  EXPECT_THAT(fault(Write("j", "{", 0)), HasSubstr("not valid JSON"));
  EXPECT_THAT(fault(Write("k", "[]", 0)), HasSubstr("an object is needed"));
  const auto entry = [&](const char* json) {
    return fault(Write("e", std::string("{\"a\": ") + json + "}", 8));
  };
  EXPECT_THAT(entry("3"), HasSubstr("tensor 'a': an object"));
  EXPECT_THAT(entry(R"({"dtype": "F31", "shape": [2], "data_offsets": [0, 8]})"),
              HasSubstr("'dtype'"));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 9]})"),
              HasSubstr("more than 8"));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [4, 8]})"),
              HasSubstr("is not 8 bytes"));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]})"),
              HasSubstr("is not 8 bytes"));
  EXPECT_THAT(
      entry(R"({"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 8]})"),
      HasSubstr("'shape'"));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [1,1,1,1,1,1,1,1,1], "data_offsets": [0, 4]})"),
              HasSubstr("9 dimensions"));
}

TEST_F(SafetensorsTest, AFolderIsItsIndexOrAllItsFiles) {
  const char* one = R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})";
  const char* two = R"({"b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}})";
  EXPECT_THAT(ReadSafetensorsFolder(folder_.path()).status().message(),
              HasSubstr("no *.safetensors"));
  Write("1.safetensors", one, 2);
  Write("2.safetensors", two, 3);
  ASSERT_OK_AND_ASSIGN(const auto all, ReadSafetensorsFolder(folder_.path()));
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[1].name, "b");
  Write("3.safetensors", one, 2);
  EXPECT_THAT(ReadSafetensorsFolder(folder_.path()).status().message(),
              HasSubstr("'a' is in both"));
  const auto index = [&](const char* map) {
    std::ofstream(folder_.path() + "/model.safetensors.index.json")
        << "{\"weight_map\": " << map << "}";
    return ReadSafetensorsFolder(folder_.path());
  };
  ASSERT_OK_AND_ASSIGN(const auto listed, index(R"({"b": "2.safetensors"})"));
  ASSERT_EQ(listed.size(), 1U);
  EXPECT_EQ(listed[0].name, "b");
  EXPECT_THAT(index(R"({"a": "2.safetensors"})").status().message(), HasSubstr("'a' is not in it"));
  EXPECT_THAT(index(R"({"a": "../2.safetensors"})").status().message(),
              HasSubstr("plain file name"));
  EXPECT_THAT(index(R"({"a": 3})").status().message(), HasSubstr("'a'"));
  EXPECT_THAT(index("3").status().message(), HasSubstr("'weight_map'"));
}

}  // namespace
}  // namespace tensorbus::formats
