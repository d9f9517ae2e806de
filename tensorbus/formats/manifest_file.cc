#include "tensorbus/formats/manifest_file.h"

#include <fmt/format.h>
#include <unordered_set>

#include "tensorbus/base/malformed.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json_fields.h"

namespace tensorbus::formats {
namespace {

constexpr std::string_view kManifestFormat = "tensorbus-manifest/1";

/// Numbers and flags are kept; what else stands there is for people.
Status ParseConfig(const Json& json, std::map<std::string, std::int64_t>* config) {
  TB_RETURN_IF_ERROR(CheckObject(json, "field 'config'"));
  for (const auto& [key, value] : json.items()) {
    if (value.is_boolean()) (*config)[key] = value.get<bool>() ? 1 : 0;
    if (!value.is_number_integer()) continue;
    TB_ASSIGN_OR_RETURN((*config)[key], AsInt(value, "field 'config'"));
  }
  return {};
}

}  // namespace

Result<Manifest> ParseManifest(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "a manifest"));
  TB_ASSIGN_OR_RETURN(const std::string format, StringField(json, "format"));
  if (format != kManifestFormat)
    return Malformed(fmt::format("field 'format': '{}', not '{}'", format, kManifestFormat));
  Manifest manifest;
  TB_ASSIGN_OR_RETURN(manifest.model, StringField(json, "model"));
  TB_ASSIGN_OR_RETURN(const Json* config, Field(json, "config"));
  TB_RETURN_IF_ERROR(ParseConfig(*config, &manifest.config));
  TB_ASSIGN_OR_RETURN(const Json* tensors, ArrayField(json, "tensors"));
  if (tensors->size() > kMaxTensors)
    return Malformed(fmt::format("field 'tensors': more than {}", kMaxTensors));
  manifest.tensors.reserve(tensors->size());
  for (std::size_t i = 0; i < tensors->size(); ++i) {
    auto spec = ParseTensorSpec((*tensors)[i]);
    if (!spec.ok()) return spec.status().Annotate(fmt::format("tensors[{}]", i));
    manifest.tensors.push_back(std::move(*spec));
  }
  std::unordered_set<std::string_view> seen;
  seen.reserve(manifest.tensors.size());
  for (const TensorSpec& spec : manifest.tensors) {
    if (!seen.insert(spec.name).second)
      return Malformed(QuotedTensor(spec.name) + " appears twice");
  }
  return manifest;
}

Result<Manifest> ReadManifest(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  auto manifest = ParseManifest(text);
  if (!manifest.ok()) return manifest.status().Annotate(path);
  return manifest;
}

}  // namespace tensorbus::formats
