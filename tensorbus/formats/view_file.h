#pragma once

#include <string>
#include <string_view>

#include "tensorbus/types/view_spec.h"

namespace tensorbus::formats {

/// Reads view specs (`tensorbus-views-1`, described in docs/planner.md). Errors: kInvalidArgument
/// naming buffer and field.
Result<ViewFile> ParseViewFile(std::string_view text);

}  // namespace tensorbus::formats
