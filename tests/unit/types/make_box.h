#pragma once

#include <vector>

#include "tensorbus/types/box.h"

namespace tensorbus {

inline Box MakeBox(const std::vector<Range>& ranges) {
  return Box(ranges);
}

}  // namespace tensorbus
