#pragma once

#include <cstdint>
#include <vector>

#include "tensorbus/types/layout.h"

namespace tensorbus::simulate {

/// How weights travel.
enum class WireForm : std::uint8_t {
  kAsIs,      ///< in the dtype they are held in
  kFp8Block,  ///< the matrices of linear layers as fp8 with an f32 scale for each block of 128 x
              ///< 128
};

/// Whether fp8 checkpoints store this tensor as fp8: the matrices of attention and feed-forward
/// layers and experts, but not embedding, head, router, norms, biases and vision towers.
bool IsQuantised(const TensorSpec& spec);

/// By tensor of the layout, whether the wire form changes it; empty for kAsIs.
std::vector<bool> QuantisedTensors(const JobLayout& layout, WireForm form);

/// The layout with the dtypes that travel: what a plan balances.
JobLayout OnWire(JobLayout layout, WireForm form);

/// Bytes of the scales that travel with a box of a quantised tensor: one f32 for every block that
/// it touches in the last two dimensions.
std::uint64_t ScaleBytes(const Box& box);

}  // namespace tensorbus::simulate
