#pragma once

#include <cstdint>
#include <string_view>

#include "tensorbus/base/status.h"

namespace tensorbus {

/// Element types. The numbers are on the wire and in digest keys; 0 is never used.
enum class DType : std::uint8_t {
  kF64 = 1,
  kF32 = 2,
  kF16 = 3,
  kBf16 = 4,
  kF8e4m3 = 5,
  kF8e5m2 = 6,
  kI64 = 7,
  kI32 = 8,
  kI16 = 9,
  kI8 = 10,
  kU8 = 11,
  kBool = 12,
  kF4e2m1x2 = 13,  ///< two values a byte; the last dimension is counted in bytes
};

/// Bytes of one element as a shape counts them.
std::uint32_t ItemBytes(DType dtype);
/// Our spelling ("bf16").
std::string_view DTypeName(DType dtype);
/// Reads our spelling and that of safetensors ("BF16"). Error: kInvalidArgument naming the known
/// ones.
Result<DType> ParseDType(std::string_view text);
/// Checks a code from the wire.
Result<DType> DTypeFromCode(std::uint8_t code);

}  // namespace tensorbus
