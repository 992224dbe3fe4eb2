// SPDX-License-Identifier: Apache-2.0
#include "graphs/graph.h"

#include <memory>

#include "bindings/register.h"

namespace lorakernels {
namespace {

CaptureMode mode_of(const std::string& name) {
  if (name == "thread_local") return CaptureMode::kThreadLocal;
  if (name == "relaxed") return CaptureMode::kRelaxed;
  throw std::invalid_argument("graph_begin_capture: mode must be \"thread_local\" or \"relaxed\", got \"" + name +
                              "\"");
}

py::list census(const Graph& graph) {
  py::list result;
  for (const NodeCount& entry : graph.census()) result.append(py::make_tuple(entry.type, entry.name, entry.count));
  return result;
}

constexpr const char* kLauncher = "lorakernels.Graph";

// launch(stream) releases the GIL, for CUDA waits if the launch queue is full.
PyObject* launch(PyObject* self, PyObject* stream) {
  auto* graph = static_cast<std::shared_ptr<Graph>*>(PyCapsule_GetPointer(self, kLauncher));
  if (graph == nullptr) return nullptr;
  const auto address = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(stream));
  if (PyErr_Occurred() != nullptr) return nullptr;
  try {
    py::gil_scoped_release unlocked;
    (*graph)->launch(address);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// A builtin function because the call of a pybind11 method takes twice as long.
PyMethodDef launch_definition = {"launch", launch, METH_O, "launch(stream)"};

py::object launcher(const std::shared_ptr<Graph>& graph) {
  const auto destroy = [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Graph>*>(PyCapsule_GetPointer(capsule, kLauncher));
  };
  auto held = std::make_unique<std::shared_ptr<Graph>>(graph);
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(held.get(), kLauncher, destroy));
  if (!capsule) throw py::error_already_set();
  held.release();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&launch_definition, capsule.ptr()));
}

}  // namespace

void register_graph(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def("replace_memsets", &Graph::replace_memsets, py::arg("most_bytes"), unlocked())
      .def("instantiate", &Graph::instantiate, unlocked())
      .def("upload", &Graph::upload, py::arg("stream"), unlocked())
      .def("launch", &Graph::launch, py::arg("stream"), unlocked())
      .def("launcher", &launcher)
      .def("update", &Graph::update, py::arg("other"), unlocked())
      .def("census", &census)
      .def("programmatic_edges", &Graph::programmatic_edges)
      .def("write_dot", &Graph::write_dot, py::arg("path"))
      .def("destroy", &Graph::destroy);
  m.def(
      "graph_begin_capture", [](uintptr_t stream, const std::string& mode) { begin_capture(stream, mode_of(mode)); },
      py::arg("stream"), py::arg("mode"));
  m.def(
      "graph_end_capture", [](uintptr_t stream) { return std::make_shared<Graph>(end_capture(stream)); },
      py::arg("stream"));
  m.def("graph_abort_capture", &abort_capture, py::arg("stream"));
}

}  // namespace lorakernels
