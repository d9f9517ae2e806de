#include "tensorbus/formats/json_fields.h"

#include <fmt/format.h>

namespace tensorbus::formats {

std::string QuotedTensor(std::string_view name) {
  constexpr std::size_t kShown = 120;
  if (name.size() <= kShown) return fmt::format("tensor '{}'", name);
  return fmt::format("tensor '{}…'", name.substr(0, kShown));
}

namespace {

Result<Shape> ParseShape(const Json& entry) {
  TB_ASSIGN_OR_RETURN(const Json* list, ArrayField(entry, "shape"));
  std::array<std::uint64_t, kMaxDims> dims = {};
  if (list->size() > dims.size()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("field 'shape': {} dimensions; at most {} are supported",
                              list->size(), kMaxDims),
                  Reason::kMalformed);
  }
  for (std::size_t d = 0; d < list->size(); ++d) {
    TB_ASSIGN_OR_RETURN(dims[d], AsUint((*list)[d], "field 'shape'", kMaxTensorBytes));
  }
  auto shape = Shape::Create(std::span(dims).first(list->size()));
  if (!shape.ok()) return shape.status().Annotate("field 'shape'");
  return shape;
}

}  // namespace

Result<TensorSpec> ParseTensorSpec(const Json& entry) {
  TB_RETURN_IF_ERROR(CheckObject(entry, "a tensor"));
  TensorSpec spec;
  TB_ASSIGN_OR_RETURN(spec.name, StringField(entry, "name"));
  const auto rest = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(const std::string dtype, StringField(entry, "dtype"));
    auto parsed = ParseDType(dtype);
    if (!parsed.ok()) return parsed.status().Annotate("field 'dtype'");
    spec.dtype = *parsed;
    TB_ASSIGN_OR_RETURN(spec.shape, ParseShape(entry));
    return {};
  };
  const Status status = rest();
  if (!status.ok()) return status.Annotate(QuotedTensor(spec.name));
  return spec;
}

}  // namespace tensorbus::formats
