#include "python/core/raise.h"

namespace tensorbus::python {

namespace py = pybind11;

void Raise(const Status& status) {
  const py::object error = py::module_::import("tensorbus.errors")
                               .attr("from_status")(static_cast<int>(status.code()),
                                                    std::string(ReasonName(status.reason())),
                                                    status.native(), status.message());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace tensorbus::python
