// SPDX-License-Identifier: Apache-2.0
// The binding of Watch, and the flattening of a layer's arguments.
#include "graphs/watch.h"

#include "graphs/call.h"

namespace lorakernels {
namespace {

// Walks depth first. Tensors go into `tensors`, and the tensor type into `spec` in their place. A container's type and
// length, and a dict's keys, go into `spec`. A class goes there with `type` before it, everything else as it is.
void flatten_into(PyObject* value, PyObject* tensor_type, py::list& tensors, py::list& spec) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (type == tensor_type || PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(tensor_type))) {
    tensors.append(py::handle(value));
    spec.append(py::handle(tensor_type));
  } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    spec.append(py::handle(type));
    spec.append(py::int_(Py_SIZE(value)));
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(value)) {
      flatten_into(item.ptr(), tensor_type, tensors, spec);
    }
  } else if (PyDict_CheckExact(value)) {
    spec.append(py::handle(type));
    spec.append(py::int_(PyDict_Size(value)));
    PyObject *key, *item;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, &item)) {
      spec.append(py::handle(key));
      flatten_into(item, tensor_type, tensors, spec);
    }
  } else {
    if (PyType_Check(value)) spec.append(py::handle(reinterpret_cast<PyObject*>(&PyType_Type)));
    spec.append(py::handle(value));
  }
}

py::tuple flatten(const py::object& value, const py::object& tensor_type) {
  py::list tensors, spec;
  flatten_into(value.ptr(), tensor_type.ptr(), tensors, spec);
  return py::make_tuple(tensors, spec);
}

}  // namespace

void register_graph_watch(py::module_& m) {
  py::class_<Watch>(m, "Watch", collected<Watch>())
      .def(py::init<>())
      .def("add_dict", &Watch::add_dict, py::arg("dict"), py::arg("keys") = py::none())
      .def("add_address", &Watch::add_address, py::arg("data_ptr"), py::arg("expected"))
      .def("add_attribute", &Watch::add_attribute, py::arg("owner"), py::arg("name"), py::arg("expected"))
      .def("check", &Watch::check);
  m.def("flatten", &flatten, py::arg("value"), py::arg("tensor_type"));
  register_graph_call(m);
}

}  // namespace lorakernels
