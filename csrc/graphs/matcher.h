// SPDX-License-Identifier: Apache-2.0
// Is this the call that was captured? There is no CUDA and no torch here: tensors' attributes are read as Python reads
// them.
#pragma once

#include <utility>
#include <vector>

#include "graphs/watch.h"

namespace lorakernels {

// What a weak reference refers to. Null if that is gone, or if `ref` is not a weak reference. The result is only
// compared, so no reference to it is held.
inline PyObject* referent(PyObject* ref) {
  if (!PyWeakref_Check(ref)) return nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(ref, &found) != 1) return nullptr;
  Py_DECREF(found);
  return found;
#else
  return PyWeakref_GetObject(ref);
#endif
}

class Matcher {
 public:
  // spec: of `flatten`. A place is a tensor's number in the call. given: (place, an object whose `ref` is a weak
  // reference to the expected tensor and `version` its version). same: (place, an earlier place with the same tensor).
  // like: (place, predicate). autocast: (callable, device, expected, callable, expected dtype).
  Matcher(const py::list& spec, const py::object& tensor_type, const py::list& given, const py::list& same,
          const py::list& like, const py::tuple& autocast, const py::object& watch)
      : tensor_type_(tensor_type), watch_object_(watch), watch_(&watch.cast<const Watch&>()) {
    for (const py::handle entry : spec) spec_.push_back(py::reinterpret_borrow<py::object>(entry));
    for (const py::handle pair : given) given_.push_back({pair[py::int_(0)].cast<size_t>(), pair[py::int_(1)]});
    for (const py::handle pair : like) like_.push_back({pair[py::int_(0)].cast<size_t>(), pair[py::int_(1)]});
    for (const py::handle pair : same) {
      same_.push_back({pair[py::int_(0)].cast<size_t>(), pair[py::int_(1)].cast<size_t>()});
    }
    for (const py::handle entry : autocast) autocast_.push_back(py::reinterpret_borrow<py::object>(entry));
  }

  // A new list of the call's tensors, or None if the call is another one.
  PyObject* match(PyObject* args, PyObject* kwargs) const {
    py::list tensors;
    size_t at = 0;
    const bool taken = walk_call(args, kwargs, tensors, at) && at == spec_.size() && is_same(tensors) &&
                       is_like(tensors) && autocast_is_same() && watch_->check() < 0;
    return taken ? tensors.release().ptr() : py::none().release().ptr();
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(tensor_type_.ptr());
    Py_VISIT(watch_object_.ptr());
    for (const py::object& entry : spec_) Py_VISIT(entry.ptr());
    for (const py::object& entry : autocast_) Py_VISIT(entry.ptr());
    for (const auto& [place, given] : given_) Py_VISIT(given.ptr());
    for (const auto& [place, like] : like_) Py_VISIT(like.ptr());
    return 0;
  }

  void clear() {  // with an empty `spec_` no call matches
    watch_ = nullptr;
    const auto type = std::exchange(tensor_type_, {}), watch = std::exchange(watch_object_, {});
    const auto spec = std::exchange(spec_, {}), autocast = std::exchange(autocast_, {});
    const auto given = std::exchange(given_, {}), like = std::exchange(like_, {});
  }

 private:
  bool next_is(PyObject* object, size_t& at) const { return at < spec_.size() && spec_[at++].ptr() == object; }

  bool next_is_length(Py_ssize_t length, size_t& at) const {
    return at < spec_.size() && PyLong_AsSsize_t(spec_[at++].ptr()) == length;
  }

  // Compares (args, kwargs) with the spec, in the order in which `flatten` wrote it.
  bool walk_call(PyObject* args, PyObject* kwargs, py::list& tensors, size_t& at) const {
    return next_is(reinterpret_cast<PyObject*>(&PyTuple_Type), at) && next_is_length(2, at) &&
           walk(args, tensors, at) && walk(kwargs, tensors, at);
  }

  bool walk(PyObject* value, py::list& tensors, size_t& at) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
    PyObject* tensor_type = tensor_type_.ptr();
    if (type == tensor_type || PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(tensor_type))) {
      tensors.append(py::handle(value));
      return next_is(tensor_type, at);
    }
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      const Py_ssize_t size = Py_SIZE(value);
      if (!next_is(type, at) || !next_is_length(size, at)) return false;
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* item = PyTuple_CheckExact(value) ? PyTuple_GET_ITEM(value, i) : PyList_GET_ITEM(value, i);
        if (!walk(item, tensors, at)) return false;
      }
      return true;
    }
    if (PyDict_CheckExact(value)) {
      if (!next_is(type, at) || !next_is_length(PyDict_Size(value), at)) return false;
      PyObject *key, *item;
      Py_ssize_t position = 0;
      while (PyDict_Next(value, &position, &key, &item)) {
        if (at >= spec_.size() || !unchanged(spec_[at++].ptr(), key) || !walk(item, tensors, at)) return false;
      }
      return true;
    }
    if (PyType_Check(value) && !next_is(reinterpret_cast<PyObject*>(&PyType_Type), at)) return false;
    return at < spec_.size() && unchanged(spec_[at++].ptr(), value);  // which compares types as well: 1 == 1.0 == True
  }

  bool is_same(const py::list& tensors) const {
    for (const auto& [place, given] : given_) {
      PyObject* x = PyList_GET_ITEM(tensors.ptr(), place);
      const py::object ref = get(given.ptr(), ref_.ptr(), nullptr), version = get(given.ptr(), version_.ptr(), nullptr);
      if (referent(ref.ptr()) != x) return false;
      const py::object now = get(x, tensor_version_.ptr(), nullptr);
      if (PyLong_AsLongLong(now.ptr()) != PyLong_AsLongLong(version.ptr())) return false;
    }
    for (const auto& [place, earlier] : same_) {
      if (PyList_GET_ITEM(tensors.ptr(), place) != PyList_GET_ITEM(tensors.ptr(), earlier)) return false;
    }
    return true;
  }

  bool is_like(const py::list& tensors) const {
    for (const auto& [place, like] : like_) {
      const py::object found =
          py::reinterpret_steal<py::object>(PyObject_CallOneArg(like.ptr(), PyList_GET_ITEM(tensors.ptr(), place)));
      if (!found) throw py::error_already_set();
      if (found.ptr() != Py_True) return false;
    }
    return true;
  }

  bool autocast_is_same() const {
    const py::object on =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(autocast_[0].ptr(), autocast_[1].ptr()));
    if (!on) throw py::error_already_set();
    if (on.ptr() != autocast_[2].ptr()) return false;
    if (on.ptr() == Py_False) return true;
    const py::object dtype =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(autocast_[3].ptr(), autocast_[1].ptr()));
    if (!dtype) throw py::error_already_set();
    return dtype.ptr() == autocast_[4].ptr();
  }

  py::object ref_ = interned("ref"), version_ = interned("version"), tensor_version_ = interned("_version");
  py::object tensor_type_, watch_object_;
  const Watch* watch_;
  std::vector<py::object> spec_, autocast_;
  std::vector<std::pair<size_t, py::object>> given_, like_;
  std::vector<std::pair<size_t, size_t>> same_;
};

}  // namespace lorakernels
