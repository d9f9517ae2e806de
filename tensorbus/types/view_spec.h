#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tensorbus/types/layout.h"

namespace tensorbus {

/// A contiguous, row-major buffer of an engine or trainer, maybe one of several in a segment.
struct BufferSpec {
  std::string name;
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;  ///< of the first byte, in the segment
  DType dtype = DType::kF32;
  Shape shape;

  friend bool operator==(const BufferSpec&, const BufferSpec&) = default;
};

/// One step from a buffer to a part of it.
struct ViewStep {
  enum class Kind : std::uint8_t {
    kNarrow,   ///< dimension `dim` from `start`, `length` indices, every `step`-th
    kSelect,   ///< index `start` of dimension `dim`, which goes away: one expert, one half
    kPermute,  ///< dimensions in the order `dims`
    kSplit,    ///< dimension `dim` becomes the dimensions `dims`, whose product it is
  };
  Kind kind = Kind::kNarrow;
  int dim = 0;
  std::uint64_t start = 0;
  std::uint64_t length = 0;
  std::uint64_t step = 1;
  std::vector<std::uint64_t> dims;

  friend bool operator==(const ViewStep&, const ViewStep&) = default;
};

/// A part of a logical tensor.
struct PartSpec {
  std::string tensor;
  std::vector<Range> box;  ///< one range a dimension
  bool whole = true;       ///< `box` is not given: the whole tensor
  std::uint64_t rows = 0;  ///< for kSegments: indices of this part in each group

  friend bool operator==(const PartSpec&, const PartSpec&) = default;
};

/// What fills a buffer, or the part of it that `steps` lead to.
struct ViewSpec {
  enum class Fill : std::uint8_t {
    kOne,          ///< a single part
    kConcatenate,  ///< parts one after the other along `dim` (qkv_proj, gate_up_proj)
    kInterleave,   ///< parts in turns of `block` indices along `dim`
    kSegments,     ///< along `dim`, groups that each hold `rows` indices of every part (per head)
  };
  std::string buffer;
  std::vector<ViewStep> steps;
  Fill fill = Fill::kOne;
  int dim = 0;
  std::uint64_t block = 1;
  std::vector<PartSpec> parts;
  bool alias = false;  ///< a second place for parts that another view maps already (tied weights)

  friend bool operator==(const ViewSpec&, const ViewSpec&) = default;
};

/// How one rank's buffers hold logical tensors.
struct ViewFile {
  std::vector<BufferSpec> buffers;
  std::vector<ViewSpec> views;
  std::vector<std::string> left_out;  ///< tensors this rank deliberately does not hold
};

}  // namespace tensorbus
