#include "tensorbus/formats/view_file.h"

#include <fmt/format.h>

#include "tensorbus/base/malformed.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json_fields.h"

namespace tensorbus::formats {
namespace {

constexpr std::string_view kViewFormat = "tensorbus-views-1";

Result<int> ParseDim(const Json& json) {
  TB_ASSIGN_OR_RETURN(const std::int64_t dim, AsInt(json, "a dimension"));
  if (dim < -64 || dim >= 64) return Malformed(fmt::format("dimension {}", dim));
  return static_cast<int>(dim);
}

Result<std::vector<std::uint64_t>> ParseSizes(const Json& json) {
  TB_RETURN_IF_ERROR(CheckArray(json, "sizes"));
  std::vector<std::uint64_t> sizes;
  for (const Json& item : json) {
    TB_ASSIGN_OR_RETURN(const std::uint64_t size, AsUint(item, "a size", kMaxTensorBytes));
    sizes.push_back(size);
  }
  return sizes;
}

/// ["narrow", dim, start, length, step], ["select", dim, index], ["permute", [dims]] or
/// ["split", dim, [sizes]].
Result<ViewStep> ParseStep(const Json& json) {
  TB_RETURN_IF_ERROR(CheckArray(json, "a step"));
  const std::string name = !json.empty() && json[0].is_string() ? json[0].get<std::string>() : "";
  const std::size_t count = json.size();
  ViewStep step;
  if (name == "permute" && count == 2) {
    step.kind = ViewStep::Kind::kPermute;
    TB_ASSIGN_OR_RETURN(step.dims, ParseSizes(json[1]));
    return step;
  }
  const bool narrow = name == "narrow" && (count == 4 || count == 5);
  const bool select = name == "select" && count == 3;
  const bool split = name == "split" && count == 3;
  if (!narrow && !select && !split) {
    return Malformed(
        "a step is [\"narrow\", dim, start, length, step], [\"select\", dim, index], "
        "[\"permute\", [dims]] or [\"split\", dim, [sizes]]");
  }
  TB_ASSIGN_OR_RETURN(step.dim, ParseDim(json[1]));
  if (split) {
    step.kind = ViewStep::Kind::kSplit;
    TB_ASSIGN_OR_RETURN(step.dims, ParseSizes(json[2]));
    return step;
  }
  step.kind = select ? ViewStep::Kind::kSelect : ViewStep::Kind::kNarrow;
  TB_ASSIGN_OR_RETURN(step.start, AsUint(json[2], "start", kMaxTensorBytes));
  if (narrow) {
    TB_ASSIGN_OR_RETURN(step.length, AsUint(json[3], "length", kMaxTensorBytes));
  }
  if (narrow && count == 5) {
    TB_ASSIGN_OR_RETURN(step.step, AsUint(json[4], "step", kMaxTensorBytes));
  }
  return step;
}

Result<PartSpec> ParsePart(const Json& json) {
  TB_RETURN_IF_ERROR(CheckObject(json, "a part"));
  PartSpec part;
  TB_ASSIGN_OR_RETURN(part.tensor, StringField(json, "tensor"));
  if (json.contains("rows")) {
    TB_ASSIGN_OR_RETURN(part.rows, UintField(json, "rows", kMaxTensorBytes));
  }
  if (!json.contains("box")) return part;
  part.whole = false;
  TB_ASSIGN_OR_RETURN(const Json* box, ArrayField(json, "box"));
  if (box->size() > kMaxDims) return Malformed("field 'box': too many dimensions");
  for (const Json& pair : *box) {
    if (!pair.is_array() || pair.size() != 2)
      return Malformed(fmt::format("field 'box': a pair [lo, hi], not {}", Describe(pair)));
    Range range;
    TB_ASSIGN_OR_RETURN(range.lo, AsUint(pair[0], "lo", kMaxTensorBytes));
    TB_ASSIGN_OR_RETURN(range.hi, AsUint(pair[1], "hi", kMaxTensorBytes));
    part.box.push_back(range);
  }
  return part;
}

/// {"dim": 0, "block": 1, "parts": […]}
Status ParseFill(const Json& json, ViewSpec* view) {
  TB_ASSIGN_OR_RETURN(const Json* dim, Field(json, "dim"));
  TB_ASSIGN_OR_RETURN(view->dim, ParseDim(*dim));
  if (json.contains("block")) {
    TB_ASSIGN_OR_RETURN(view->block, UintField(json, "block", kMaxTensorBytes));
  }
  TB_ASSIGN_OR_RETURN(const Json* parts, ArrayField(json, "parts"));
  for (const Json& item : *parts) {
    TB_ASSIGN_OR_RETURN(PartSpec part, ParsePart(item));
    view->parts.push_back(std::move(part));
  }
  return {};
}

Status ParseWhat(const Json& json, ViewSpec* view) {
  if (json.contains("steps")) {
    TB_ASSIGN_OR_RETURN(const Json* steps, ArrayField(json, "steps"));
    for (const Json& item : *steps) {
      TB_ASSIGN_OR_RETURN(ViewStep step, ParseStep(item));
      view->steps.push_back(std::move(step));
    }
  }
  if (json.contains("alias")) {
    TB_ASSIGN_OR_RETURN(view->alias, AsBool(json["alias"], "field 'alias'"));
  }
  int fills = 0;
  for (const auto& [key, fill] : {std::pair{"part", ViewSpec::Fill::kOne},
                                  std::pair{"concatenate", ViewSpec::Fill::kConcatenate},
                                  std::pair{"interleave", ViewSpec::Fill::kInterleave},
                                  std::pair{"segments", ViewSpec::Fill::kSegments}}) {
    if (!json.contains(key)) continue;
    ++fills;
    view->fill = fill;
    if (fill == ViewSpec::Fill::kOne) {
      TB_ASSIGN_OR_RETURN(PartSpec part, ParsePart(json[key]));
      view->parts.push_back(std::move(part));
    } else {
      const Status status = ParseFill(json[key], view);
      if (!status.ok()) return status.Annotate(fmt::format("field '{}'", key));
    }
  }
  if (fills == 1) return {};
  return Malformed("one of 'part', 'concatenate', 'interleave' and 'segments' is needed");
}

Result<BufferSpec> ParseBuffer(const Json& json) {
  TB_ASSIGN_OR_RETURN(TensorSpec spec, ParseTensorSpec(json));
  BufferSpec buffer{std::move(spec.name), 0, 0, spec.dtype, spec.shape};
  if (json.contains("segment")) {
    TB_ASSIGN_OR_RETURN(const std::uint64_t segment, UintField(json, "segment", kMaxTensors));
    buffer.segment = static_cast<std::uint32_t>(segment);
  }
  if (json.contains("offset")) {
    TB_ASSIGN_OR_RETURN(buffer.offset, UintField(json, "offset", kMaxTensorBytes));
  }
  return buffer;
}

}  // namespace

Result<ViewFile> ParseViewFile(std::string_view text) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "a view file"));
  TB_ASSIGN_OR_RETURN(const std::string format, StringField(json, "format"));
  if (format != kViewFormat)
    return Malformed(fmt::format("field 'format': '{}', not '{}'", format, kViewFormat));
  ViewFile file;
  TB_ASSIGN_OR_RETURN(const Json* buffers, ArrayField(json, "buffers"));
  for (const Json& item : *buffers) {
    TB_ASSIGN_OR_RETURN(BufferSpec buffer, ParseBuffer(item));
    file.buffers.push_back(std::move(buffer));
  }
  TB_ASSIGN_OR_RETURN(const Json* views, ArrayField(json, "views"));
  for (std::size_t i = 0; i < views->size(); ++i) {
    ViewSpec view;
    auto buffer = StringField((*views)[i], "buffer");
    if (!buffer.ok()) return buffer.status().Annotate(fmt::format("views[{}]", i));
    view.buffer = std::move(*buffer);
    const Status status = ParseWhat((*views)[i], &view);
    if (!status.ok()) return status.Annotate(fmt::format("views[{}]: buffer '{}'", i, view.buffer));
    file.views.push_back(std::move(view));
  }
  if (json.contains("left_out")) {
    TB_ASSIGN_OR_RETURN(const Json* names, ArrayField(json, "left_out"));
    for (const Json& name : *names) {
      TB_ASSIGN_OR_RETURN(std::string text_name, AsString(name, "field 'left_out'"));
      file.left_out.push_back(std::move(text_name));
    }
  }
  return file;
}

}  // namespace tensorbus::formats
