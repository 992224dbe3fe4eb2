// SPDX-License-Identifier: Apache-2.0
// What a replay relies on in Python, compared before every launch in a microsecond or two: entries of dicts (a module's
// parameters, buffers and plain attributes), addresses (bound Tensor.data_ptr) and attributes (Tensor.requires_grad).
// And the flattening of a layer's arguments. No CUDA, no torch.
#include <cstdint>
#include <vector>

#include "register.h"

namespace lorakernels {
namespace {

bool is_plain(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

// The same object, or equal plain values: an attribute may be assigned anew without having changed.
bool unchanged(PyObject* before, PyObject* now) {
  if (before == now) return true;
  if (Py_TYPE(before) != Py_TYPE(now) || !is_plain(before)) return false;
  const int equal = PyObject_RichCompareBool(before, now, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

struct Entry {
  py::object key, value;
  bool watched;
};

struct WatchedDict {
  py::dict dict;
  std::vector<Entry> entries;
  bool exact;  // no entry may come or go

  bool same() const {
    if (exact && static_cast<size_t>(PyDict_Size(dict.ptr())) != entries.size()) return false;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    size_t i = 0;
    while (i < entries.size() && PyDict_Next(dict.ptr(), &position, &key, &value)) {
      const Entry& entry = entries[i++];
      if (key != entry.key.ptr()) return same_by_key();
      if (entry.watched && value != entry.value.ptr() && !unchanged(entry.value.ptr(), value)) return false;
    }
    return i == entries.size() || same_by_key();
  }

  bool same_by_key() const {
    for (const Entry& entry : entries) {
      if (!entry.watched) continue;
      PyObject* value = PyDict_GetItemWithError(dict.ptr(), entry.key.ptr());
      if (value == nullptr || !unchanged(entry.value.ptr(), value)) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }
};

class Watch {
 public:
  // keys: which entries count; None for all, and for their number.
  void add_dict(const py::dict& dict, const py::object& keys) {
    WatchedDict watched{dict, {}, keys.is_none()};
    for (const auto& item : dict) {
      const bool counts = keys.is_none() || keys.contains(item.first);
      // Of an entry that does not count, the value is not held.
      watched.entries.push_back({py::reinterpret_borrow<py::object>(item.first),
                                 counts ? py::reinterpret_borrow<py::object>(item.second) : py::none(), counts});
    }
    dicts_.push_back(std::move(watched));
  }

  void add_address(const py::object& data_ptr, uint64_t expected) { addresses_.push_back({data_ptr, expected}); }

  void add_attribute(const py::object& owner, const py::str& name, const py::object& expected) {
    attributes_.push_back({owner, name, expected});
  }

  // -1, or the number of the first thing that changed: dicts first, then addresses, then attributes, as added.
  int64_t check() const {
    int64_t index = 0;
    for (const WatchedDict& watched : dicts_) {
      if (!watched.same()) return index;
      ++index;
    }
    for (const auto& [data_ptr, expected] : addresses_) {
      const py::object now = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(data_ptr.ptr()));
      if (!now) throw py::error_already_set();
      if (PyLong_AsUnsignedLongLongMask(now.ptr()) != expected) return index;
      ++index;
    }
    for (const Attribute& attribute : attributes_) {
      const py::object now =
          py::reinterpret_steal<py::object>(PyObject_GetAttr(attribute.owner.ptr(), attribute.name.ptr()));
      if (!now) throw py::error_already_set();
      if (!unchanged(attribute.expected.ptr(), now.ptr())) return index;
      ++index;
    }
    return -1;
  }

 private:
  struct Attribute {
    py::object owner, name, expected;
  };
  std::vector<WatchedDict> dicts_;
  std::vector<std::pair<py::object, uint64_t>> addresses_;
  std::vector<Attribute> attributes_;
};

// Depth first: tensors into `tensors`; into `spec` a container's type and length (and a dict's keys), the tensor type
// in place of a tensor, and everything else as it is.
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
  py::class_<Watch>(m, "Watch")
      .def(py::init<>())
      .def("add_dict", &Watch::add_dict, py::arg("dict"), py::arg("keys") = py::none())
      .def("add_address", &Watch::add_address, py::arg("data_ptr"), py::arg("expected"))
      .def("add_attribute", &Watch::add_attribute, py::arg("owner"), py::arg("name"), py::arg("expected"))
      .def("check", &Watch::check);
  m.def("flatten", &flatten, py::arg("value"), py::arg("tensor_type"));
}

}  // namespace lorakernels
