#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensorbus/types/layout.h"

namespace tensorbus::formats {

/// Families of published decoders whose checkpoints name and shape their tensors alike.
enum class ModelFamily : std::uint8_t {
  kLlama,     ///< Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral
  kDeepseek,  ///< DeepSeek-V3, Kimi-K2: latent attention, shared and routed experts
  kGptOss,    ///< gpt-oss: stacked experts
  kGemma3,    ///< Gemma 3 with its vision tower
  kQwen25Vl,  ///< Qwen2.5-VL with its vision tower
};

/// How the large matrices are stored.
enum class WeightForm : std::uint8_t {
  kPlain,      ///< in the model's dtype
  kFp8Blocks,  ///< fp8 with an f32 scale for each block of 128 x 128
  kMxfp4,      ///< packed fp4 with a scale byte for 32 values (experts of gpt-oss)
};

/// A model by the numbers of its configuration, under the names manifests use for them (`layers`,
/// `hidden`, `heads`, `experts`, …; a flag is 0 or 1).
struct ModelDescription {
  ModelFamily family = ModelFamily::kLlama;
  WeightForm form = WeightForm::kPlain;
  DType dtype = DType::kBf16;
  std::map<std::string, std::int64_t> numbers;
};

/// Every tensor of such a model's checkpoint, in layer order. Pure.
///
/// Errors: kInvalidArgument naming the number that is missing, not positive or too large;
/// kResourceExhausted for more than kMaxTensors.
Result<std::vector<TensorSpec>> TensorsOf(const ModelDescription& model);

}  // namespace tensorbus::formats
