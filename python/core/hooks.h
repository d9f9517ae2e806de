#pragma once

#include <pybind11/pybind11.h>

#include "tensorbus/client/client.h"

namespace tensorbus::python {

/// A hook that calls `function(kind, session, version, timeout_s)` with the GIL held, in whatever
/// thread it comes. What it raises becomes kAborted with the exception's text. None: no hook.
client::Hook MakeHook(pybind11::object function);

}  // namespace tensorbus::python
