#pragma once

#include <string>
#include <string_view>

#include "tensorbus/types/layout.h"

namespace tensorbus::formats {

/// Reads a layout file (`tensorbus-layout-1`), from text or, possibly gzipped, from a path. The
/// layout it returns is valid. Errors: as ReadText(); kInvalidArgument naming tensor, rank and
/// field for whatever is not well formed.
Result<JobLayout> ParseLayoutFile(std::string_view text);
Result<JobLayout> ReadLayoutFile(const std::string& path);

/// A layout as text of this format, with explicit boxes.
std::string WriteLayoutFile(const JobLayout& layout);

}  // namespace tensorbus::formats
