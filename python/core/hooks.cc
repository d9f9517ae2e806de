#include "python/core/hooks.h"

#include <memory>

namespace py = pybind11;

namespace tensorbus::python {

client::Hook MakeHook(py::object function) {
  if (function.is_none()) return {};
  // Copies of the hook are made and die without the GIL: they share one owner that takes it.
  const std::shared_ptr<py::object> shared(new py::object(std::move(function)), [](py::object* p) {
    const py::gil_scoped_acquire gil;
    delete p;
  });
  return [shared](const client::HookEvent& event) -> Status {
    const py::gil_scoped_acquire gil;
    try {
      (*shared)(static_cast<int>(event.kind), event.session.value, event.version.value,
                Seconds(event.timeout));
      return {};
    } catch (const py::error_already_set& e) {
      return {Code::kAborted, e.what()};
    } catch (const std::exception& e) {
      return {Code::kInternal, e.what()};
    }
  };
}

}  // namespace tensorbus::python
