#pragma once

#include <pybind11/pybind11.h>
#include <string>
#include <utility>

#include "tensorbus/base/status.h"

namespace tensorbus::python {

/// Raises what tensorbus.errors makes of a failure.
[[noreturn]] void Raise(const Status& status);

inline void Check(const Status& status) {
  if (!status.ok()) Raise(status);
}

template <typename T>
T Check(Result<T> result) {
  if (!result.ok()) Raise(result.status());
  return std::move(result).value();
}

}  // namespace tensorbus::python
