#pragma once

#include <string>

#include "tensorbus/types/manifest.h"

namespace tensorbus::cli {

/// Reads a model by what people call it: the name of a manifest in `manifests` (a folder), a folder
/// of safetensors files (only their headers are read; a `config.json` beside them gives the numbers
/// placements need), or a JSON file: a manifest or a Hugging Face `config.json`. Every decoder
/// layer up to the last must have tensors.
///
/// Errors: kNotFound naming the near manifests; those of the readers; kInvalidArgument
/// (kLayoutMismatch) naming layers that are missing.
Result<Manifest> LoadModel(const std::string& name, const std::string& manifests);

}  // namespace tensorbus::cli
