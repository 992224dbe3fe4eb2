// SPDX-License-Identifier: Apache-2.0
// What this folder needs of CPython. There is no CUDA and no torch here.
#pragma once

#include <cstdint>

#include "bindings/register.h"

namespace lorakernels {

inline py::object interned(const char* text) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text));
}

inline bool is_plain(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

// Whether both are the same object or equal plain values. An attribute may be assigned again without a change.
inline bool unchanged(PyObject* before, PyObject* now) {
  if (before == now) return true;
  if (Py_TYPE(before) != Py_TYPE(now) || !is_plain(before)) return false;
  const int equal = PyObject_RichCompareBool(before, now, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

// CPython 3.10 to 3.12 give a dict a new version whenever anything in it is set, added or removed. 0 in later versions.
inline uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  return 0;
#endif
}

// The getter that a lookup of the name finds in the type: a data descriptor, which has precedence over the instance's
// dict. Null if there is none, or if the type looks names up in its own way.
inline const PyGetSetDef* getter_of(PyObject* owner, PyObject* name) {
  PyObject* found = _PyType_Lookup(Py_TYPE(owner), name);
  const bool plain = found != nullptr && Py_IS_TYPE(found, &PyGetSetDescr_Type) &&
                     Py_TYPE(owner)->tp_getattro == PyObject_GenericGetAttr;
  return plain ? reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset : nullptr;
}

inline py::object get(PyObject* owner, PyObject* name, const PyGetSetDef* getter) {
  py::object value = py::reinterpret_steal<py::object>(getter != nullptr ? getter->get(owner, getter->closure)
                                                                         : PyObject_GetAttr(owner, name));
  if (!value) throw py::error_already_set();
  return value;
}

// The T of a bound object. Null while its constructor runs: the garbage collector tracks the object already then.
template <typename T>
T* held(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  const bool made = instance->simple_layout && instance->simple_holder_constructed;
  return made ? static_cast<T*>(instance->simple_value_holder[0]) : nullptr;
}

// For py::class_<T>: lets the garbage collector see what a T holds. A T is part of cycles, for it holds layers, which
// hold the graphs that hold the T. T::traverse visits every object that it owns a reference to, and T::clear drops
// them. A cleared T can still be called, and must not answer that nothing has changed.
template <typename T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
      Py_VISIT(Py_TYPE(self));
      const T* value = held<T>(self);
      return value == nullptr ? 0 : value->traverse(visit, arg);
    };
    type->tp_clear = [](PyObject* self) -> int {
      if (T* value = held<T>(self)) value->clear();
      return 0;
    };
  });
}

// What `call` returns, for a builtin function. Null, and Python's error is set, if it throws.
template <typename Call>
PyObject* guarded(const Call& call) {
  try {
    return call();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A builtin function that `self` is bound to. The call of a pybind11 method takes twice as long as the work done here.
inline py::object bound(PyMethodDef& definition, const py::object& self) {
  const auto made = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
  if (!made) throw py::error_already_set();
  return made;
}

}  // namespace lorakernels
