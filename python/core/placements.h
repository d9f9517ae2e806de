#pragma once

#include <pybind11/pybind11.h>

namespace tensorbus::python {

/// Adds `boxes_at(shape, mesh, placements, coordinate)`: the boxes, as tuples of (lo, hi), that one
/// coordinate of a mesh of those sizes holds. Placements are texts as ParsePlacement() reads them.
void DefinePlacements(pybind11::module_& m);

}  // namespace tensorbus::python
