#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/types/layout.h"

namespace tensorbus::formats {

/// Largest header read of one safetensors file, and of all files of a folder together. The largest
/// published ones have about 20 MB.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = std::uint64_t{64} << 20;
inline constexpr std::size_t kMaxSafetensorsFiles = 10'000;

/// The tensors that a header's JSON text lists, in the order of their data; `data_bytes` is how
/// much data follows it. Error: kInvalidArgument naming the tensor.
Result<std::vector<TensorSpec>> ParseSafetensorsHeader(std::string_view text,
                                                       std::uint64_t data_bytes);

/// The tensors of one safetensors file, in the order of their data. Only the header is read.
/// Errors: as the system says; kInvalidArgument naming file and tensor for a header that is too
/// large, truncated, not JSON, or whose offsets do not fit the file or the shape.
Result<std::vector<TensorSpec>> ReadSafetensorsHeader(const std::string& path);

/// The tensors of a checkpoint's folder: those that `model.safetensors.index.json` lists, else
/// those of every `*.safetensors` file, files by name. Errors: as above; kNotFound when the folder
/// has none; kInvalidArgument for a tensor that is in two files or not in the one the index names.
Result<std::vector<TensorSpec>> ReadSafetensorsFolder(const std::string& folder);

}  // namespace tensorbus::formats
