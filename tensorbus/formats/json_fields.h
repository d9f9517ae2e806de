#pragma once

#include <string>
#include <string_view>

#include "tensorbus/formats/json.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::formats {

/// "tensor 'a'", a long name cut, for messages.
std::string QuotedTensor(std::string_view name);

/// `name`, `dtype` and `shape` of a tensor's JSON object. The error names tensor and field.
Result<TensorSpec> ParseTensorSpec(const Json& entry);

}  // namespace tensorbus::formats
