#pragma once

#include <array>
#include <cstdio>
#include <span>
#include <vector>

#include "tensorbus/client/client.h"

// The model of the two examples: a matrix and a vector. Trainer and engine cut the matrix
// differently.
namespace example {

inline constexpr std::uint64_t kRows = 8;
inline constexpr std::uint64_t kColumns = 6;

inline std::vector<tensorbus::TensorSpec> Tensors() {
  const std::array<std::uint64_t, 2> matrix = {kRows, kColumns};
  const std::array<std::uint64_t, 1> vector = {kColumns};
  return {{"matrix", tensorbus::DType::kF32, tensorbus::Shape::Create(matrix).value()},
          {"vector", tensorbus::DType::kF32, tensorbus::Shape::Create(vector).value()}};
}

/// The stretch [lo, hi) of every dimension of tensor `index`, row-major at `offset` of segment 0.
inline tensorbus::Piece Contiguous(std::uint32_t index, std::span<const tensorbus::Range> ranges,
                                   std::uint64_t offset) {
  tensorbus::Piece piece;
  piece.tensor = index;
  piece.box = tensorbus::Box(ranges);
  piece.offset = offset;
  std::uint64_t stride = sizeof(float);
  for (std::size_t d = ranges.size(); d-- > 0;) {
    piece.strides[d] = stride;
    stride *= ranges[d].size();
  }
  return piece;
}

/// What element (row, column) of the matrix is in `version`; the vector is row 100.
inline float Value(std::uint64_t version, std::uint64_t row, std::uint64_t column) {
  return static_cast<float>(version * 10'000 + row * 100 + column);
}

inline int Fail(const tensorbus::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

}  // namespace example
