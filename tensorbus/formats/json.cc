#include "tensorbus/formats/json.h"

#include <algorithm>
#include <cstdint>
#include <fmt/format.h>

#include "tensorbus/base/malformed.h"

namespace tensorbus::formats {
namespace {

/// What parsing a text would cost; no need for the text to be valid.
struct Extent {
  int depth = 0;             ///< deepest nesting of brackets outside strings
  std::uint64_t memory = 0;  ///< of the values, roughly
};

Extent Measure(std::string_view text) {
  constexpr std::uint64_t kValue = 2 * sizeof(Json);  // vectors keep room to grow
  constexpr std::uint64_t kPair = 96;                 // a tree node with its key
  Extent extent;
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
      continue;
    }
    if (c == '"') {
      in_string = true;
      extent.memory += sizeof(std::string);
    } else if (c == '[' || c == '{') {
      extent.depth = std::max(extent.depth, ++depth);
      extent.memory += sizeof(Json::array_t) + kValue;
    } else if (c == ']' || c == '}') {
      --depth;
    } else if (c == ':') {
      extent.memory += kPair;
    } else if (c == ',') {
      extent.memory += kValue;
    }
  }
  return extent;
}

}  // namespace

Result<Json> ParseJson(std::string_view text) {
  const Extent extent = Measure(text);
  if (extent.depth > kMaxJsonDepth)
    return Malformed(fmt::format("JSON nested deeper than {}", kMaxJsonDepth));
  if (extent.memory > kMaxJsonMemory) {
    return Malformed(fmt::format("JSON that would take about {} MiB of memory; at most {} are read",
                                 extent.memory >> 20, kMaxJsonMemory >> 20));
  }
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    return Malformed(fmt::format("not valid JSON: {}", error.what()));
  }
}

std::string Describe(const Json& value) {
  if (value.is_string()) return "a string";
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return "an object";
  if (value.is_null()) return "null";
  return value.dump();
}

Status CheckObject(const Json& value, std::string_view what) {
  if (value.is_object()) return {};
  return Malformed(fmt::format("{}: an object is needed, not {}", what, Describe(value)));
}

Status CheckArray(const Json& value, std::string_view what) {
  if (value.is_array()) return {};
  return Malformed(fmt::format("{}: a list is needed, not {}", what, Describe(value)));
}

Result<const Json*> Field(const Json& object, const char* key) {
  TB_RETURN_IF_ERROR(CheckObject(object, fmt::format("what should hold '{}'", key)));
  const auto found = object.find(key);
  if (found == object.end()) return Malformed(fmt::format("field '{}' is missing", key));
  return &*found;
}

Result<std::uint64_t> AsUint(const Json& value, std::string_view what, std::uint64_t max) {
  if (!value.is_number_integer() || (!value.is_number_unsigned() && value.get<std::int64_t>() < 0))
    return Malformed(
        fmt::format("{}: a whole number from 0 is needed, not {}", what, Describe(value)));
  const auto number = value.get<std::uint64_t>();
  if (number > max) return Malformed(fmt::format("{}: {} is more than {}", what, number, max));
  return number;
}

Result<std::int64_t> AsInt(const Json& value, std::string_view what) {
  if (value.is_number_unsigned() &&
      value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX)) {
    return value.get<std::int64_t>();
  }
  if (value.is_number_integer() && !value.is_number_unsigned()) return value.get<std::int64_t>();
  return Malformed(fmt::format("{}: a whole number is needed, not {}", what, Describe(value)));
}

Result<std::string> AsString(const Json& value, std::string_view what) {
  if (value.is_string()) return value.get<std::string>();
  return Malformed(fmt::format("{}: a string is needed, not {}", what, Describe(value)));
}

Result<bool> AsBool(const Json& value, std::string_view what) {
  if (value.is_boolean()) return value.get<bool>();
  return Malformed(fmt::format("{}: true or false is needed, not {}", what, Describe(value)));
}

Result<std::string> StringField(const Json& object, const char* key) {
  TB_ASSIGN_OR_RETURN(const Json* value, Field(object, key));
  return AsString(*value, fmt::format("field '{}'", key));
}

Result<std::uint64_t> UintField(const Json& object, const char* key, std::uint64_t max) {
  TB_ASSIGN_OR_RETURN(const Json* value, Field(object, key));
  return AsUint(*value, fmt::format("field '{}'", key), max);
}

Result<const Json*> ArrayField(const Json& object, const char* key) {
  TB_ASSIGN_OR_RETURN(const Json* value, Field(object, key));
  TB_RETURN_IF_ERROR(CheckArray(*value, fmt::format("field '{}'", key)));
  return value;
}

}  // namespace tensorbus::formats
