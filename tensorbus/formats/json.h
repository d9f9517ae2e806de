#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "tensorbus/base/status.h"

namespace tensorbus::formats {

using Json = nlohmann::json;

/// Deepest nesting accepted; our formats need a handful.
inline constexpr int kMaxJsonDepth = 64;

/// Most memory that the values of one text may take, estimated before any is made.
inline constexpr std::uint64_t kMaxJsonMemory = std::uint64_t{2} << 30;

/// Parses text from outside. Error: kInvalidArgument (kMalformed) with the place of the fault, or
/// saying that it is nested too deep or holds too much.
Result<Json> ParseJson(std::string_view text);

/// Typed access to JSON from outside. Each names the field in its error and leaves where it stands
/// to the caller's Annotate().
Result<const Json*> Field(const Json& object, const char* key);
Status CheckObject(const Json& value, std::string_view what);
Status CheckArray(const Json& value, std::string_view what);
Result<std::uint64_t> AsUint(const Json& value, std::string_view what, std::uint64_t max);
Result<std::int64_t> AsInt(const Json& value, std::string_view what);
Result<std::string> AsString(const Json& value, std::string_view what);
Result<bool> AsBool(const Json& value, std::string_view what);
Result<std::string> StringField(const Json& object, const char* key);
Result<std::uint64_t> UintField(const Json& object, const char* key, std::uint64_t max);
Result<const Json*> ArrayField(const Json& object, const char* key);

/// What stands there, in words, for messages: "a string", "-3", "a list of 2".
std::string Describe(const Json& value);

}  // namespace tensorbus::formats
