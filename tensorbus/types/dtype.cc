#include "tensorbus/types/dtype.h"

#include <array>
#include <fmt/format.h>

namespace tensorbus {
namespace {

struct Row {
  DType dtype;
  std::uint32_t bytes;
  std::string_view name;
  std::string_view safetensors;
};

constexpr std::array<Row, 13> kRows = {{{DType::kF64, 8, "f64", "F64"},
                                        {DType::kF32, 4, "f32", "F32"},
                                        {DType::kF16, 2, "f16", "F16"},
                                        {DType::kBf16, 2, "bf16", "BF16"},
                                        {DType::kF8e4m3, 1, "f8e4m3", "F8_E4M3"},
                                        {DType::kF8e5m2, 1, "f8e5m2", "F8_E5M2"},
                                        {DType::kI64, 8, "i64", "I64"},
                                        {DType::kI32, 4, "i32", "I32"},
                                        {DType::kI16, 2, "i16", "I16"},
                                        {DType::kI8, 1, "i8", "I8"},
                                        {DType::kU8, 1, "u8", "U8"},
                                        {DType::kBool, 1, "bool", "BOOL"},
                                        {DType::kF4e2m1x2, 1, "f4e2m1x2", "F4_E2M1X2"}}};

const Row& RowOf(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype) - 1;
  TB_CHECK(index < kRows.size());
  return kRows[index];
}

}  // namespace

std::uint32_t ItemBytes(DType dtype) {
  return RowOf(dtype).bytes;
}
std::string_view DTypeName(DType dtype) {
  return RowOf(dtype).name;
}

Result<DType> ParseDType(std::string_view text) {
  std::string known;
  for (const Row& row : kRows) {
    if (text == row.name || text == row.safetensors) return row.dtype;
    known += known.empty() ? "" : " ";
    known += row.name;
  }
  return Status(Code::kInvalidArgument, fmt::format("unknown dtype '{}'; known: {}", text, known),
                Reason::kMalformed);
}

Result<DType> DTypeFromCode(std::uint8_t code) {
  if (code >= 1 && code <= kRows.size()) return static_cast<DType>(code);
  return Status(Code::kInvalidArgument, fmt::format("unknown dtype code {}", code),
                Reason::kMalformed);
}

}  // namespace tensorbus
