#include "tensorbus/formats/model_config_file.h"

#include <array>
#include <fmt/format.h>

#include "tensorbus/base/malformed.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json.h"

namespace tensorbus::formats {
namespace {

using Numbers = std::map<std::string, std::int64_t>;

/// A number of ours and the field it comes from.
struct Name {
  const char* ours;
  const char* theirs;
};

constexpr std::array<Name, 5> kDecoder = {{{"layers", "num_hidden_layers"},
                                           {"hidden", "hidden_size"},
                                           {"heads", "num_attention_heads"},
                                           {"kv_heads", "num_key_value_heads"},
                                           {"vocab", "vocab_size"}}};
constexpr std::array<Name, 8> kLatent = {{{"q_lora", "q_lora_rank"},
                                          {"kv_lora", "kv_lora_rank"},
                                          {"nope", "qk_nope_head_dim"},
                                          {"rope", "qk_rope_head_dim"},
                                          {"v_dim", "v_head_dim"},
                                          {"inter", "intermediate_size"},
                                          {"moe_inter", "moe_intermediate_size"},
                                          {"experts", "n_routed_experts"}}};
constexpr std::array<Name, 3> kLatentOptional = {{{"shared", "n_shared_experts"},
                                                  {"dense_layers", "first_k_dense_replace"},
                                                  {"mtp", "num_nextn_predict_layers"}}};

/// Reads fields of one object, null counting as missing.
class Fields {
 public:
  explicit Fields(const Json& json) : json_(json) {}

  bool Has(const char* key) const {
    const auto found = json_.find(key);
    return found != json_.end() && !found->is_null();
  }
  Result<std::int64_t> Number(const char* key) const {
    if (!Has(key)) return Malformed(fmt::format("field '{}' is missing", key));
    return AsInt(json_.at(key), fmt::format("field '{}'", key));
  }
  Result<std::int64_t> NumberOr(const char* key, std::int64_t otherwise) const {
    if (!Has(key)) return otherwise;
    return Number(key);
  }
  Result<bool> Flag(const char* key) const {
    if (!Has(key)) return false;
    return AsBool(json_.at(key), fmt::format("field '{}'", key));
  }
  Result<const Json*> Object(const char* key) const {
    TB_ASSIGN_OR_RETURN(const Json* value, Field(json_, key));
    TB_RETURN_IF_ERROR(CheckObject(*value, fmt::format("field '{}'", key)));
    return value;
  }
  Status Take(const Name& name, Numbers* numbers) const {
    TB_ASSIGN_OR_RETURN((*numbers)[name.ours], Number(name.theirs));
    return {};
  }

 private:
  const Json& json_;
};

/// What all decoders have. `head_dim` and `kv_heads` have customary values where they are left out.
Status ReadDecoder(const Fields& fields, Numbers* numbers) {
  for (const Name& name : kDecoder) {
    const bool optional = std::string_view(name.ours) == "kv_heads";
    if (!optional || fields.Has(name.theirs)) TB_RETURN_IF_ERROR(fields.Take(name, numbers));
  }
  Numbers& n = *numbers;
  if (n.find("kv_heads") == n.end()) n["kv_heads"] = n["heads"];
  if (fields.Has("head_dim")) return fields.Take({"head_dim", "head_dim"}, numbers);
  if (n["heads"] <= 0 || n["hidden"] % n["heads"] != 0) {
    return Malformed(
        fmt::format("field 'head_dim' is missing, and hidden_size {} does not divide "
                    "by num_attention_heads {}",
                    n["hidden"], n["heads"]));
  }
  n["head_dim"] = n["hidden"] / n["heads"];
  return {};
}

/// Refuses a flag that would add tensors we do not know the names of.
Status RefuseFlag(const Fields& fields, const char* key) {
  TB_ASSIGN_OR_RETURN(const bool set, fields.Flag(key));
  if (!set) return {};
  return {Code::kUnimplemented, fmt::format("field '{}': true is not supported", key),
          Reason::kUnsupported};
}

Status ReadLlama(const std::string& type, const Fields& fields, ModelDescription* model) {
  Numbers& n = model->numbers;
  TB_RETURN_IF_ERROR(ReadDecoder(fields, &n));
  TB_RETURN_IF_ERROR(RefuseFlag(fields, "attention_bias"));
  TB_RETURN_IF_ERROR(RefuseFlag(fields, "mlp_bias"));
  TB_ASSIGN_OR_RETURN(const bool tied, fields.Flag("tie_word_embeddings"));
  n["lm_head"] = tied ? 0 : 1;
  n["qkv_bias"] = type == "qwen2" ? 1 : 0;
  n["qk_norm"] = type == "qwen3" || type == "qwen3_moe" ? 1 : 0;
  if (type == "mixtral") {
    n["mixtral_names"] = 1;
    TB_RETURN_IF_ERROR(fields.Take({"experts", "num_local_experts"}, &n));
    return fields.Take({"moe_inter", "intermediate_size"}, &n);
  }
  if (type != "qwen3_moe") return fields.Take({"inter", "intermediate_size"}, &n);
  TB_RETURN_IF_ERROR(fields.Take({"experts", "num_experts"}, &n));
  TB_ASSIGN_OR_RETURN(const std::int64_t step, fields.NumberOr("decoder_sparse_step", 1));
  if (step != 1) {
    return {Code::kUnimplemented,
            fmt::format("field 'decoder_sparse_step': {}; only 1 is supported", step),
            Reason::kUnsupported};
  }
  return fields.Take({"moe_inter", "moe_intermediate_size"}, &n);
}

/// "fp8" with blocks of 128 x 128 is what the family's published checkpoints have.
Status ReadFp8(const Fields& fields, ModelDescription* model) {
  if (!fields.Has("quantization_config")) return {};
  TB_ASSIGN_OR_RETURN(const Json* quantization, fields.Object("quantization_config"));
  TB_ASSIGN_OR_RETURN(const std::string method, StringField(*quantization, "quant_method"));
  const Json block = quantization->value("weight_block_size", Json());
  if (method != "fp8" || block != Json({128, 128})) {
    return {Code::kUnimplemented,
            fmt::format("field 'quantization_config': method '{}' with blocks {} is not supported; "
                        "fp8 with [128,128] is",
                        method, block.dump()),
            Reason::kUnsupported};
  }
  model->form = WeightForm::kFp8Blocks;
  return {};
}

Status ReadDeepseek(const std::string& type, const Fields& fields, ModelDescription* model) {
  Numbers& n = model->numbers;
  model->family = ModelFamily::kDeepseek;
  for (const Name& name : kDecoder) TB_RETURN_IF_ERROR(fields.Take(name, &n));
  for (const Name& name : kLatent) TB_RETURN_IF_ERROR(fields.Take(name, &n));
  for (const Name& name : kLatentOptional) {
    TB_ASSIGN_OR_RETURN(n[name.ours], fields.NumberOr(name.theirs, 0));
  }
  // The published Kimi checkpoints carry a rotary buffer per layer, of half a "head" of the hidden
  // size.
  if (type == "kimi_k2" && n["heads"] > 0) n["inv_freq"] = n["hidden"] / n["heads"] / 2;
  return ReadFp8(fields, model);
}

Status ReadGptOss(const Fields& fields, ModelDescription* model) {
  Numbers& n = model->numbers;
  model->family = ModelFamily::kGptOss;
  TB_RETURN_IF_ERROR(ReadDecoder(fields, &n));
  TB_RETURN_IF_ERROR(fields.Take({"inter", "intermediate_size"}, &n));
  TB_RETURN_IF_ERROR(fields.Take({"experts", "num_local_experts"}, &n));
  if (!fields.Has("quantization_config")) return {};
  TB_ASSIGN_OR_RETURN(const Json* quantization, fields.Object("quantization_config"));
  TB_ASSIGN_OR_RETURN(const std::string method, StringField(*quantization, "quant_method"));
  if (method != "mxfp4") {
    return {
        Code::kUnimplemented,
        fmt::format("field 'quantization_config': method '{}' is not supported; mxfp4 is", method),
        Reason::kUnsupported};
  }
  model->form = WeightForm::kMxfp4;
  return {};
}

Status ReadGemma3(const Fields& fields, ModelDescription* model) {
  constexpr std::int64_t kUsualVocab = 262'208;  // left out in the published files
  constexpr std::int64_t kPatch = 14;
  Numbers& n = model->numbers;
  model->family = ModelFamily::kGemma3;
  TB_ASSIGN_OR_RETURN(const Json* given, fields.Object("text_config"));
  Json decoder = *given;
  if (!decoder.contains("vocab_size")) decoder["vocab_size"] = kUsualVocab;
  TB_RETURN_IF_ERROR(ReadDecoder(Fields(decoder), &n));
  TB_RETURN_IF_ERROR(Fields(decoder).Take({"inter", "intermediate_size"}, &n));
  TB_ASSIGN_OR_RETURN(const Json* tower, fields.Object("vision_config"));
  const Fields vision(*tower);
  for (const Name& name :
       {Name{"vit_hidden", "hidden_size"}, Name{"vit_inter", "intermediate_size"},
        Name{"vit_layers", "num_hidden_layers"}}) {
    TB_RETURN_IF_ERROR(vision.Take(name, &n));
  }
  TB_ASSIGN_OR_RETURN(const std::int64_t image, vision.Number("image_size"));
  TB_ASSIGN_OR_RETURN(const std::int64_t patch, vision.NumberOr("patch_size", kPatch));
  if (patch != kPatch || image < kPatch || image > 1 << 20)
    return Malformed(
        fmt::format("field 'vision_config': patches of {} in images of {}", patch, image));
  n["vit_positions"] = (image / patch) * (image / patch);
  n["tied"] = 1;
  return {};
}

Status ReadQwen25Vl(const Fields& fields, ModelDescription* model) {
  Numbers& n = model->numbers;
  model->family = ModelFamily::kQwen25Vl;
  TB_RETURN_IF_ERROR(ReadDecoder(fields, &n));
  TB_RETURN_IF_ERROR(fields.Take({"inter", "intermediate_size"}, &n));
  n["qkv_bias"] = 1;
  TB_ASSIGN_OR_RETURN(const Json* tower, fields.Object("vision_config"));
  const Fields vision(*tower);
  for (const Name& name : {Name{"vit_hidden", "hidden_size"},
                           Name{"vit_inter", "intermediate_size"}, Name{"vit_layers", "depth"}}) {
    TB_RETURN_IF_ERROR(vision.Take(name, &n));
  }
  return {};
}

Result<DType> ReadDtype(const Json& json) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!Fields(json).Has(key)) continue;
    TB_ASSIGN_OR_RETURN(const std::string text, AsString(json.at(key), key));
    for (const auto& [name, dtype] :
         {std::pair{"bfloat16", DType::kBf16}, std::pair{"float16", DType::kF16},
          std::pair{"float32", DType::kF32}}) {
      if (text == name) return dtype;
    }
    return Malformed(
        fmt::format("field '{}': '{}'; bfloat16, float16 or float32 is needed", key, text));
  }
  return DType::kBf16;
}

}  // namespace

Result<ModelDescription> ParseModelConfig(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "a model's config"));
  TB_ASSIGN_OR_RETURN(const std::string type, StringField(json, "model_type"));
  ModelDescription model;
  TB_ASSIGN_OR_RETURN(model.dtype, ReadDtype(json));
  const Fields fields(json);
  const auto read = [&]() -> Status {
    for (const char* known : {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"}) {
      if (type == known) return ReadLlama(type, fields, &model);
    }
    if (type == "deepseek_v3" || type == "kimi_k2") return ReadDeepseek(type, fields, &model);
    if (type == "gpt_oss") return ReadGptOss(fields, &model);
    if (type == "gemma3") return ReadGemma3(fields, &model);
    if (type == "qwen2_5_vl") return ReadQwen25Vl(fields, &model);
    return {
        Code::kUnimplemented,
        "not a family known here (llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, "
        "deepseek_v3, kimi_k2, gpt_oss, gemma3, qwen2_5_vl); name the folder of its safetensors "
        "files instead",
        Reason::kUnsupported};
  };
  const Status status = read();
  if (!status.ok()) return status.Annotate(fmt::format("model_type '{}'", type));
  return model;
}

Result<ModelDescription> ReadModelConfig(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  auto model = ParseModelConfig(text);
  if (!model.ok()) return model.status().Annotate(path);
  return model;
}

Result<Manifest> ManifestOf(const std::string& name, const ModelDescription& model) {
  Manifest manifest;
  manifest.model = name;
  manifest.config = model.numbers;
  TB_ASSIGN_OR_RETURN(manifest.tensors, TensorsOf(model));
  return manifest;
}

}  // namespace tensorbus::formats
