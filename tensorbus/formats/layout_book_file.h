#pragma once

#include <string>
#include <string_view>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout_book.h"

namespace tensorbus::formats {

/// Reads a layouts file (share/manifests/layouts.md describes the keys), from text or, possibly
/// gzipped, from a path. Its expressions and placements are not looked into here. Errors: as
/// ReadText(); kInvalidArgument naming layout or scenario and field.
Result<LayoutBook> ParseLayoutBook(std::string_view text);
Result<LayoutBook> ReadLayoutBook(const std::string& path);

}  // namespace tensorbus::formats
