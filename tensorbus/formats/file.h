#pragma once

#include <cstdint>
#include <string>

#include "tensorbus/base/status.h"

namespace tensorbus::formats {

/// Largest file read, and largest text a compressed one may become.
inline constexpr std::uint64_t kMaxTextBytes = std::uint64_t{1} << 30;

/// Reads a whole file; one that starts like gzip is decompressed. Errors: kNotFound,
/// kPermissionDenied and the like from the system; kInvalidArgument for a damaged or oversized one.
/// All name the path.
Result<std::string> ReadText(const std::string& path);

/// Decompresses gzip data of at most kMaxTextBytes.
Result<std::string> Gunzip(const std::string& data);

}  // namespace tensorbus::formats
