#include "tensorbus/formats/model_tensors.h"

#include <algorithm>
#include <fmt/format.h>
#include <initializer_list>

namespace tensorbus::formats {
namespace {

/// Keeps sums and products of a few of them far below 2^64; Shape bounds the products of many.
constexpr std::int64_t kMaxNumber = std::int64_t{1} << 31;
constexpr std::uint64_t kFp8Block = 128;
constexpr std::uint64_t kMxfp4Block = 32;

std::uint64_t CeilDiv(std::uint64_t a, std::uint64_t b) {
  return (a + b - 1) / b;
}

/// Collects tensors and the first fault, so that the lists below read as lists.
class Builder {
 public:
  explicit Builder(const ModelDescription& model) : model_(model) {}

  /// A number that must be there.
  std::uint64_t Need(const char* key) {
    const auto found = model_.numbers.find(key);
    if (found == model_.numbers.end()) {
      Fail(fmt::format("'{}' is not given", key));
      return 1;
    }
    return Checked(key, found->second, 1);
  }
  /// A number that is 0 when it is not there.
  std::uint64_t Get(const char* key) {
    const auto found = model_.numbers.find(key);
    return found == model_.numbers.end() ? 0 : Checked(key, found->second, 0);
  }

  void Add(const std::string& name, std::initializer_list<std::uint64_t> dims) {
    Add(name, dims, model_.dtype);
  }
  void Add(const std::string& name, std::initializer_list<std::uint64_t> dims, DType dtype) {
    if (!status_.ok()) return;
    if (tensors_.size() == kMaxTensors) return RefuseSize();
    const auto shape = Shape::Create(std::span(dims.begin(), dims.size()));
    if (!shape.ok()) {
      status_ = shape.status().Annotate(fmt::format("tensor '{}'", name));
      return;
    }
    tensors_.push_back({name, dtype, *shape});
  }
  /// A matrix that the checkpoint may hold as fp8 with block scales.
  void AddLinear(const std::string& name, std::uint64_t rows, std::uint64_t columns) {
    if (model_.form != WeightForm::kFp8Blocks) return Add(name + ".weight", {rows, columns});
    Add(name + ".weight", {rows, columns}, DType::kF8e4m3);
    Add(name + ".weight_scale_inv", {CeilDiv(rows, kFp8Block), CeilDiv(columns, kFp8Block)},
        DType::kF32);
  }

  void RefuseSize() {
    if (!status_.ok()) return;
    status_ = {Code::kResourceExhausted,
               fmt::format("the model has more than {} tensors", kMaxTensors),
               Reason::kUnsupported};
  }
  bool failed() const { return !status_.ok(); }
  Result<std::vector<TensorSpec>> Finish() && {
    if (!status_.ok()) return status_;
    return std::move(tensors_);
  }

 private:
  std::uint64_t Checked(const char* key, std::int64_t value, std::int64_t least) {
    if (value >= least && value <= kMaxNumber) return static_cast<std::uint64_t>(value);
    Fail(fmt::format("'{}' is {}; from {} to {} is possible", key, value, least, kMaxNumber));
    return 1;
  }
  void Fail(std::string message) {
    if (status_.ok()) status_ = {Code::kInvalidArgument, std::move(message), Reason::kMalformed};
  }

  const ModelDescription& model_;
  Status status_;
  std::vector<TensorSpec> tensors_;
};

void AddQkv(Builder& b, const std::string& layer, bool bias) {
  const std::uint64_t hidden = b.Need("hidden");
  const std::uint64_t dim = b.Need("head_dim");
  const std::uint64_t kv_rows = b.Need("kv_heads") * dim;
  for (const auto& [name, rows] :
       {std::pair{"q", b.Need("heads") * dim}, std::pair{"k", kv_rows}, std::pair{"v", kv_rows}}) {
    const std::string proj = fmt::format("{}self_attn.{}_proj.", layer, name);
    b.Add(proj + "weight", {rows, hidden});
    if (bias) b.Add(proj + "bias", {rows});
  }
  b.Add(layer + "self_attn.o_proj.weight", {hidden, b.Need("heads") * dim});
}

void AddMlp(Builder& b, const std::string& prefix, std::uint64_t inter) {
  const std::uint64_t hidden = b.Need("hidden");
  b.AddLinear(prefix + "gate_proj", inter, hidden);
  b.AddLinear(prefix + "up_proj", inter, hidden);
  b.AddLinear(prefix + "down_proj", hidden, inter);
}

/// The router and the experts of a layer of Qwen3-MoE or Mixtral.
void AddExperts(Builder& b, const std::string& layer) {
  const std::uint64_t hidden = b.Need("hidden");
  const std::uint64_t inter = b.Need("moe_inter");
  const std::uint64_t experts = b.Need("experts");
  const bool mixtral = b.Get("mixtral_names") != 0;
  const std::string block = layer + (mixtral ? "block_sparse_moe." : "mlp.");
  b.Add(block + "gate.weight", {experts, hidden});
  for (std::uint64_t e = 0; e < experts && !b.failed(); ++e) {
    const std::string expert = fmt::format("{}experts.{}.", block, e);
    if (!mixtral) {
      AddMlp(b, expert, inter);
      continue;
    }
    b.Add(expert + "w1.weight", {inter, hidden});
    b.Add(expert + "w2.weight", {hidden, inter});
    b.Add(expert + "w3.weight", {inter, hidden});
  }
}

void AddHead(Builder& b) {
  b.Add("lm_head.weight", {b.Need("vocab"), b.Need("hidden")});
}

void AddLlama(Builder& b) {
  const std::uint64_t hidden = b.Need("hidden");
  b.Add("model.embed_tokens.weight", {b.Need("vocab"), hidden});
  for (std::uint64_t l = 0; l < b.Need("layers") && !b.failed(); ++l) {
    const std::string layer = fmt::format("model.layers.{}.", l);
    b.Add(layer + "input_layernorm.weight", {hidden});
    AddQkv(b, layer, b.Get("qkv_bias") != 0);
    if (b.Get("qk_norm") != 0) {
      b.Add(layer + "self_attn.q_norm.weight", {b.Need("head_dim")});
      b.Add(layer + "self_attn.k_norm.weight", {b.Need("head_dim")});
    }
    b.Add(layer + "post_attention_layernorm.weight", {hidden});
    if (b.Get("experts") != 0) {
      AddExperts(b, layer);
    } else {
      AddMlp(b, layer + "mlp.", b.Need("inter"));
    }
  }
  b.Add("model.norm.weight", {hidden});
}

void AddDeepseekLayer(Builder& b, std::uint64_t index) {
  const std::uint64_t hidden = b.Need("hidden");
  const std::uint64_t heads = b.Need("heads");
  const std::uint64_t q_lora = b.Need("q_lora");
  const std::uint64_t kv_lora = b.Need("kv_lora");
  const std::uint64_t nope = b.Need("nope");
  const std::uint64_t rope = b.Need("rope");
  const std::uint64_t v_dim = b.Need("v_dim");
  const std::string layer = fmt::format("model.layers.{}.", index);
  const std::string attention = layer + "self_attn.";
  b.Add(layer + "input_layernorm.weight", {hidden});
  b.AddLinear(attention + "q_a_proj", q_lora, hidden);
  b.Add(attention + "q_a_layernorm.weight", {q_lora});
  b.AddLinear(attention + "q_b_proj", heads * (nope + rope), q_lora);
  b.AddLinear(attention + "kv_a_proj_with_mqa", kv_lora + rope, hidden);
  b.Add(attention + "kv_a_layernorm.weight", {kv_lora});
  b.AddLinear(attention + "kv_b_proj", heads * (nope + v_dim), kv_lora);
  b.AddLinear(attention + "o_proj", hidden, heads * v_dim);
  if (b.Get("inv_freq") != 0) b.Add(attention + "rotary_emb.inv_freq", {b.Get("inv_freq")});
  b.Add(layer + "post_attention_layernorm.weight", {hidden});
  if (index < b.Get("dense_layers")) return AddMlp(b, layer + "mlp.", b.Need("inter"));
  const std::uint64_t experts = b.Need("experts");
  b.Add(layer + "mlp.gate.weight", {experts, hidden});
  b.Add(layer + "mlp.gate.e_score_correction_bias", {experts}, DType::kF32);
  for (std::uint64_t e = 0; e < experts && !b.failed(); ++e)
    AddMlp(b, fmt::format("{}mlp.experts.{}.", layer, e), b.Need("moe_inter"));
  if (b.Get("shared") != 0)
    AddMlp(b, layer + "mlp.shared_experts.", b.Need("moe_inter") * b.Get("shared"));
}

void AddDeepseek(Builder& b) {
  const std::uint64_t hidden = b.Need("hidden");
  const std::uint64_t vocab = b.Need("vocab");
  const std::uint64_t layers = b.Need("layers");
  b.Add("model.embed_tokens.weight", {vocab, hidden});
  for (std::uint64_t l = 0; l < layers && !b.failed(); ++l) AddDeepseekLayer(b, l);
  b.Add("model.norm.weight", {hidden});
  AddHead(b);
  for (std::uint64_t l = layers; l < layers + b.Get("mtp") && !b.failed(); ++l) {
    const std::string layer = fmt::format("model.layers.{}.", l);
    b.Add(layer + "embed_tokens.weight", {vocab, hidden});
    b.Add(layer + "enorm.weight", {hidden});
    b.Add(layer + "hnorm.weight", {hidden});
    b.Add(layer + "eh_proj.weight", {hidden, 2 * hidden});
    AddDeepseekLayer(b, l);
    b.Add(layer + "shared_head.norm.weight", {hidden});
    b.Add(layer + "shared_head.head.weight", {vocab, hidden});
  }
}

void AddGptOss(Builder& b, bool mxfp4) {
  const std::uint64_t hidden = b.Need("hidden");
  const std::uint64_t inter = b.Need("inter");
  const std::uint64_t experts = b.Need("experts");
  b.Add("model.embed_tokens.weight", {b.Need("vocab"), hidden});
  for (std::uint64_t l = 0; l < b.Need("layers") && !b.failed(); ++l) {
    const std::string layer = fmt::format("model.layers.{}.", l);
    b.Add(layer + "input_layernorm.weight", {hidden});
    AddQkv(b, layer, true);
    b.Add(layer + "self_attn.o_proj.bias", {hidden});
    b.Add(layer + "self_attn.sinks", {b.Need("heads")});
    b.Add(layer + "post_attention_layernorm.weight", {hidden});
    b.Add(layer + "mlp.router.weight", {experts, hidden});
    b.Add(layer + "mlp.router.bias", {experts});
    const std::string block = layer + "mlp.experts.";
    if (mxfp4) {
      b.Add(block + "gate_up_proj_blocks", {experts, 2 * inter, hidden / kMxfp4Block, 16},
            DType::kU8);
      b.Add(block + "gate_up_proj_scales", {experts, 2 * inter, hidden / kMxfp4Block}, DType::kU8);
    } else {
      b.Add(block + "gate_up_proj", {experts, hidden, 2 * inter});
    }
    b.Add(block + "gate_up_proj_bias", {experts, 2 * inter});
    if (mxfp4) {
      b.Add(block + "down_proj_blocks", {experts, hidden, inter / kMxfp4Block, 16}, DType::kU8);
      b.Add(block + "down_proj_scales", {experts, hidden, inter / kMxfp4Block}, DType::kU8);
    } else {
      b.Add(block + "down_proj", {experts, inter, hidden});
    }
    b.Add(block + "down_proj_bias", {experts, hidden});
  }
  b.Add("model.norm.weight", {hidden});
  AddHead(b);
}

void AddGemma3Vision(Builder& b) {
  const std::uint64_t wide = b.Need("vit_hidden");
  const std::uint64_t inter = b.Need("vit_inter");
  const auto add_pair = [&](const std::string& name, std::initializer_list<std::uint64_t> weight,
                            std::uint64_t bias) {
    b.Add(name + ".weight", weight);
    b.Add(name + ".bias", {bias});
  };
  b.Add("multi_modal_projector.mm_input_projection_weight", {wide, b.Need("hidden")});
  b.Add("multi_modal_projector.mm_soft_emb_norm.weight", {wide});
  const std::string tower = "vision_tower.vision_model.";
  add_pair(tower + "embeddings.patch_embedding", {wide, 3, 14, 14}, wide);
  b.Add(tower + "embeddings.position_embedding.weight", {b.Need("vit_positions"), wide});
  for (std::uint64_t l = 0; l < b.Need("vit_layers") && !b.failed(); ++l) {
    const std::string layer = fmt::format("{}encoder.layers.{}.", tower, l);
    add_pair(layer + "layer_norm1", {wide}, wide);
    add_pair(layer + "layer_norm2", {wide}, wide);
    for (const char* name : {"q_proj", "k_proj", "v_proj", "out_proj"})
      add_pair(layer + "self_attn." + name, {wide, wide}, wide);
    add_pair(layer + "mlp.fc1", {inter, wide}, inter);
    add_pair(layer + "mlp.fc2", {wide, inter}, wide);
  }
  add_pair(tower + "post_layernorm", {wide}, wide);
}

void AddGemma3(Builder& b) {
  const std::uint64_t hidden = b.Need("hidden");
  const std::string decoder = "language_model.model.";
  b.Add(decoder + "embed_tokens.weight", {b.Need("vocab"), hidden});
  for (std::uint64_t l = 0; l < b.Need("layers") && !b.failed(); ++l) {
    const std::string layer = fmt::format("{}layers.{}.", decoder, l);
    for (const char* name : {"input", "post_attention", "pre_feedforward", "post_feedforward"})
      b.Add(layer + name + "_layernorm.weight", {hidden});
    AddQkv(b, layer, false);
    b.Add(layer + "self_attn.q_norm.weight", {b.Need("head_dim")});
    b.Add(layer + "self_attn.k_norm.weight", {b.Need("head_dim")});
    AddMlp(b, layer + "mlp.", b.Need("inter"));
  }
  b.Add(decoder + "norm.weight", {hidden});
  AddGemma3Vision(b);
}

void AddQwen25Vl(Builder& b) {
  const std::uint64_t wide = b.Need("vit_hidden");
  const std::uint64_t inter = b.Need("vit_inter");
  b.Add("visual.patch_embed.proj.weight", {wide, 3, 2, 14, 14});
  const auto add_pair = [&](const std::string& name, std::uint64_t rows, std::uint64_t columns) {
    b.Add(name + ".weight", {rows, columns});
    b.Add(name + ".bias", {rows});
  };
  for (std::uint64_t l = 0; l < b.Need("vit_layers") && !b.failed(); ++l) {
    const std::string layer = fmt::format("visual.blocks.{}.", l);
    b.Add(layer + "norm1.weight", {wide});
    b.Add(layer + "norm2.weight", {wide});
    add_pair(layer + "attn.qkv", 3 * wide, wide);
    add_pair(layer + "attn.proj", wide, wide);
    add_pair(layer + "mlp.gate_proj", inter, wide);
    add_pair(layer + "mlp.up_proj", inter, wide);
    add_pair(layer + "mlp.down_proj", wide, inter);
  }
  b.Add("visual.merger.ln_q.weight", {wide});
  add_pair("visual.merger.mlp.0", 4 * wide, 4 * wide);
  add_pair("visual.merger.mlp.2", b.Need("hidden"), 4 * wide);
  AddLlama(b);
  AddHead(b);
}

}  // namespace

Result<std::vector<TensorSpec>> TensorsOf(const ModelDescription& model) {
  Builder b(model);
  // A layer or expert has at least one tensor: absurd numbers are refused before any is made.
  if (b.Need("layers") * std::max<std::uint64_t>(1, b.Get("experts")) > kMaxTensors) b.RefuseSize();
  switch (model.family) {
    case ModelFamily::kLlama:
      AddLlama(b);
      if (b.Get("lm_head") != 0) AddHead(b);
      break;
    case ModelFamily::kDeepseek:
      AddDeepseek(b);
      break;
    case ModelFamily::kGptOss:
      AddGptOss(b, model.form == WeightForm::kMxfp4);
      break;
    case ModelFamily::kGemma3:
      AddGemma3(b);
      break;
    case ModelFamily::kQwen25Vl:
      AddQwen25Vl(b);
      break;
  }
  return std::move(b).Finish();
}

}  // namespace tensorbus::formats
