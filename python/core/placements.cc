#include "python/core/placements.h"

#include <cstdint>
#include <pybind11/stl.h>
#include <string>
#include <utility>
#include <vector>

#include "tensorbus/types/placement.h"

#include "python/core/raise.h"

namespace py = pybind11;

namespace tensorbus::python {
namespace {

using RangeTuple = std::pair<std::uint64_t, std::uint64_t>;

Result<std::vector<Box>> BoxesOfRank(const std::vector<std::uint64_t>& shape,
                                     const std::vector<std::uint32_t>& mesh,
                                     const std::vector<std::string>& placements,
                                     const std::vector<std::uint32_t>& coordinate) {
  TB_ASSIGN_OR_RETURN(const Shape whole, Shape::Create(shape));
  DeviceMesh grid;
  for (const std::uint32_t size : mesh) grid.axes.push_back({.name = "", .size = size});
  TB_RETURN_IF_ERROR(Validate(grid, kMaxRanks));
  bool inside = coordinate.size() == mesh.size();
  for (std::size_t a = 0; inside && a < mesh.size(); ++a) inside = coordinate[a] < mesh[a];
  if (!inside) {
    return Status(Code::kInvalidArgument, "a coordinate that is not on the mesh",
                  Reason::kLayoutMismatch);
  }
  std::vector<Placement> parsed;
  for (const std::string& text : placements) {
    TB_ASSIGN_OR_RETURN(const Placement placement, ParsePlacement(text));
    parsed.push_back(placement);
  }
  return BoxesAt(grid, parsed, whole, coordinate);
}

}  // namespace

void DefinePlacements(py::module_& m) {
  m.def(
      "boxes_at",
      [](const std::vector<std::uint64_t>& shape, const std::vector<std::uint32_t>& mesh,
         const std::vector<std::string>& placements, const std::vector<std::uint32_t>& coordinate) {
        std::vector<py::tuple> out;
        for (const Box& box : Check(BoxesOfRank(shape, mesh, placements, coordinate))) {
          std::vector<RangeTuple> ranges;
          for (const Range& range : box.ranges()) ranges.emplace_back(range.lo, range.hi);
          out.emplace_back(py::tuple(py::cast(ranges)));
        }
        return out;
      },
      py::arg("shape"), py::arg("mesh"), py::arg("placements"), py::arg("coordinate"));
}

}  // namespace tensorbus::python
