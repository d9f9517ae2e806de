#pragma once

#include <string>
#include <string_view>

#include "tensorbus/types/manifest.h"

namespace tensorbus::formats {

/// Reads a manifest (`tensorbus-manifest/1`), from text or, possibly gzipped, from a path. Names
/// are unique in what it returns. Errors: as ReadText(); kInvalidArgument naming tensor and field.
Result<Manifest> ParseManifest(std::string_view text);
Result<Manifest> ReadManifest(const std::string& path);

}  // namespace tensorbus::formats
