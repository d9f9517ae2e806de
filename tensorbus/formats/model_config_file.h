#pragma once

#include <string>
#include <string_view>

#include "tensorbus/formats/model_tensors.h"
#include "tensorbus/types/manifest.h"

namespace tensorbus::formats {

/// Reads a Hugging Face `config.json` of a known family: llama, mistral, qwen2, qwen3, qwen3_moe,
/// mixtral, deepseek_v3, kimi_k2, gpt_oss, gemma3, qwen2_5_vl. A head that is tied to the embedding
/// is no tensor of its own. Errors: as ReadText(); kInvalidArgument naming the field that is
/// missing or says something unsupported; kUnimplemented for other families, listing these.
Result<ModelDescription> ParseModelConfig(std::string_view text);
Result<ModelDescription> ReadModelConfig(const std::string& path);

/// The tensors and numbers of a described model. Errors as TensorsOf().
Result<Manifest> ManifestOf(const std::string& name, const ModelDescription& model);

}  // namespace tensorbus::formats
