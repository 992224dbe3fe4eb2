// SPDX-License-Identifier: Apache-2.0
// Two questions that every replay asks, each answered by one call from Python. `matcher`: is this the call that was
// captured? `GradSlots`: where are the parameters' gradients? If the answer is not the usual one, Python finds out why
// and refuses.
#include "graphs/call.h"

#include <memory>

#include "graphs/grad_slots.h"
#include "graphs/matcher.h"

namespace lorakernels {
namespace {

PyObject* match(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(arguments[0]) || !PyDict_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "match takes a tuple of arguments and a dict of named ones");
    return nullptr;
  }
  return guarded([&] { return held<Matcher>(self)->match(arguments[0], arguments[1]); });
}

PyMethodDef match_definition = {"match", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(match)),
                                METH_FASTCALL,
                                "match(args, kwargs): the tensors in them, if they are the captured call's; else None"};

py::object matcher(const py::list& spec, const py::object& tensor_type, const py::list& given, const py::list& same,
                   const py::list& like, const py::tuple& autocast, const py::object& watch) {
  auto made = std::make_unique<Matcher>(spec, tensor_type, given, same, like, autocast, watch);
  return bound(match_definition, py::cast(std::move(made)));
}

}  // namespace

void register_graph_call(py::module_& m) {
  m.def("matcher", &matcher, py::arg("spec"), py::arg("tensor_type"), py::arg("given"), py::arg("same"),
        py::arg("like"), py::arg("autocast"), py::arg("watch"));
  py::class_<Matcher>(m, "Matcher", collected<Matcher>());
  py::class_<GradSlots>(m, "GradSlots", collected<GradSlots>())
      .def(py::init<const py::list&>(), py::arg("targets"))
      .def("state", &GradSlots::state)
      .def("install", &GradSlots::install);
}

}  // namespace lorakernels
