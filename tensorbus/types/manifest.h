#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensorbus/types/layout.h"

namespace tensorbus {

/// A model's tensors, in layer order, and the numbers of its configuration that placements need
/// (`head_dim`, `heads`, `kv_heads`, `layers`, `experts`, …; a flag is 0 or 1).
struct Manifest {
  std::string model;
  std::map<std::string, std::int64_t> config;
  std::vector<TensorSpec> tensors;
};

}  // namespace tensorbus
