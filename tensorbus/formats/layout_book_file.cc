#include "tensorbus/formats/layout_book_file.h"

#include <charconv>
#include <fmt/format.h>

#include "tensorbus/base/malformed.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json_fields.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::formats {
namespace {

constexpr std::string_view kLayoutBookFormat = "tensorbus-layouts/1";

/// A list of two strings.
Result<std::pair<std::string, std::string>> ParsePair(const Json& json, std::string_view what) {
  if (!json.is_array() || json.size() != 2 || !json[0].is_string() || !json[1].is_string()) {
    return Malformed(
        fmt::format("{}: a list of two strings is needed, not {}", what, Describe(json)));
  }
  return std::pair(json[0].get<std::string>(), json[1].get<std::string>());
}

Result<LayoutTemplate::Mesh> ParseMesh(const std::string& name, const Json& json) {
  LayoutTemplate::Mesh mesh{name, {}};
  const std::string what = fmt::format("mesh '{}'", name);
  TB_RETURN_IF_ERROR(CheckArray(json, what));
  for (const Json& axis : json) {
    if (!axis.is_array() || axis.size() != 2 || !axis[0].is_string())
      return Malformed(fmt::format("{}: an axis is [name, size], not {}", what, Describe(axis)));
    TB_ASSIGN_OR_RETURN(const std::uint64_t size, AsUint(axis[1], what, kMaxRanks));
    mesh.axes.emplace_back(axis[0].get<std::string>(), static_cast<std::uint32_t>(size));
  }
  return mesh;
}

Result<LayoutTemplate::Rule> ParseRule(const Json& json) {
  if (!json.is_array() || json.size() != 3 || !json[0].is_string() || !json[1].is_string() ||
      !json[2].is_array()) {
    return Malformed(fmt::format("field 'rules': [classes, mesh, placements] is needed, not {}",
                                 Describe(json)));
  }
  LayoutTemplate::Rule rule{json[0].get<std::string>(), json[1].get<std::string>(), {}};
  for (const Json& item : json[2]) {
    TB_ASSIGN_OR_RETURN(auto placement, ParsePair(item, "field 'rules': placement"));
    rule.placements.push_back(std::move(placement));
  }
  return rule;
}

Result<LayoutTemplate> ParseTemplate(const Json& json) {
  LayoutTemplate layout;
  TB_ASSIGN_OR_RETURN(const Json* meshes, Field(json, "meshes"));
  TB_RETURN_IF_ERROR(CheckObject(*meshes, "field 'meshes'"));
  for (const auto& [name, axes] : meshes->items()) {
    TB_ASSIGN_OR_RETURN(auto mesh, ParseMesh(name, axes));
    layout.meshes.push_back(std::move(mesh));
  }
  TB_ASSIGN_OR_RETURN(const Json* rules, ArrayField(json, "rules"));
  for (const Json& item : *rules) {
    TB_ASSIGN_OR_RETURN(auto rule, ParseRule(item));
    layout.rules.push_back(std::move(rule));
  }
  return layout;
}

Status ParseStages(const Json& json, TemplateUse* use) {
  if (json.is_string()) {
    constexpr std::string_view kPrefix = "vllm:";
    const auto text = json.get<std::string>();
    const char* end = text.data() + text.size();
    const bool fine = text.compare(0, kPrefix.size(), kPrefix) == 0 && [&] {
      const auto parsed = std::from_chars(text.data() + kPrefix.size(), end, use->vllm_stages);
      return parsed.ec == std::errc() && parsed.ptr == end && use->vllm_stages >= 1 &&
             use->vllm_stages <= kMaxRanks;
    }();
    if (fine) return {};
    return Malformed(fmt::format("field 'pp_layers': 'vllm:N' or a list is needed, not '{}'",
                                 text.substr(0, 40)));
  }
  TB_RETURN_IF_ERROR(CheckArray(json, "field 'pp_layers'"));
  for (const Json& count : json) {
    TB_ASSIGN_OR_RETURN(const std::uint64_t layers,
                        AsUint(count, "field 'pp_layers'", kMaxTensors));
    use->pp_layers.push_back(static_cast<std::uint32_t>(layers));
  }
  return {};
}

Result<TemplateUse> ParseUse(const Json& json) {
  TemplateUse use;
  TB_ASSIGN_OR_RETURN(use.layout, StringField(json, "layout"));
  if (const auto size = json.find("size"); size != json.end()) {
    TB_RETURN_IF_ERROR(CheckObject(*size, "field 'size'"));
    for (const auto& [axis, value] : size->items()) {
      TB_ASSIGN_OR_RETURN(const std::uint64_t n, AsUint(value, "field 'size'", kMaxRanks));
      use.size[axis] = static_cast<std::uint32_t>(n);
    }
  }
  if (const auto param = json.find("param"); param != json.end()) {
    TB_RETURN_IF_ERROR(CheckObject(*param, "field 'param'"));
    for (const auto& [word, value] : param->items()) {
      if (!value.is_string() && !value.is_number_integer()) {
        return Malformed(
            fmt::format("field 'param': a number or string is needed, not {}", Describe(value)));
      }
      use.param[word] = value.is_string() ? value.get<std::string>() : value.dump();
    }
  }
  if (const auto stages = json.find("pp_layers"); stages != json.end() && !stages->is_null())
    TB_RETURN_IF_ERROR(ParseStages(*stages, &use));
  if (const auto drop = json.find("drop"); drop != json.end() && !drop->is_null()) {
    TB_ASSIGN_OR_RETURN(use.drop, AsString(*drop, "field 'drop'"));
  }
  return use;
}

Result<Scenario> ParseScenario(const Json& json) {
  Scenario scenario;
  TB_ASSIGN_OR_RETURN(scenario.id, StringField(json, "id"));
  const auto rest = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(scenario.manifest, StringField(json, "manifest"));
    if (const auto flag = json.find("colocated"); flag != json.end()) {
      TB_ASSIGN_OR_RETURN(scenario.colocated, AsBool(*flag, "field 'colocated'"));
    }
    for (const auto& [side, use] :
         {std::pair{"source", &scenario.source}, std::pair{"target", &scenario.target}}) {
      TB_ASSIGN_OR_RETURN(const Json* json_side, Field(json, side));
      auto parsed = ParseUse(*json_side);
      if (!parsed.ok()) return parsed.status().Annotate(side);
      *use = std::move(*parsed);
    }
    return {};
  };
  const Status status = rest();
  if (!status.ok()) return status.Annotate(fmt::format("scenario '{}'", scenario.id));
  return scenario;
}

}  // namespace

Result<LayoutBook> ParseLayoutBook(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "a layouts file"));
  TB_ASSIGN_OR_RETURN(const std::string format, StringField(json, "format"));
  if (format != kLayoutBookFormat)
    return Malformed(fmt::format("field 'format': '{}', not '{}'", format, kLayoutBookFormat));
  LayoutBook book;
  TB_ASSIGN_OR_RETURN(const Json* classes, ArrayField(json, "classes"));
  for (const Json& item : *classes) {
    TB_ASSIGN_OR_RETURN(auto pair, ParsePair(item, "field 'classes'"));
    book.classes.push_back(std::move(pair));
  }
  TB_ASSIGN_OR_RETURN(const Json* layouts, Field(json, "layouts"));
  TB_RETURN_IF_ERROR(CheckObject(*layouts, "field 'layouts'"));
  for (const auto& [name, item] : layouts->items()) {
    auto layout = ParseTemplate(item);
    if (!layout.ok()) return layout.status().Annotate(fmt::format("layout '{}'", name));
    book.layouts.emplace(name, std::move(*layout));
  }
  for (const char* list : {"scenarios", "tiny"}) {
    const auto found = json.find(list);
    if (found == json.end()) continue;
    TB_RETURN_IF_ERROR(CheckArray(*found, fmt::format("field '{}'", list)));
    for (const Json& item : *found) {
      TB_ASSIGN_OR_RETURN(Scenario scenario, ParseScenario(item));
      book.scenarios.push_back(std::move(scenario));
    }
  }
  return book;
}

Result<LayoutBook> ReadLayoutBook(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  auto book = ParseLayoutBook(text);
  if (!book.ok()) return book.status().Annotate(path);
  return book;
}

}  // namespace tensorbus::formats
