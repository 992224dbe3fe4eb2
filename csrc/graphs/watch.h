// SPDX-License-Identifier: Apache-2.0
// What a replay relies on in Python, compared before every launch in a microsecond or two: entries of dicts (a module's
// parameters, buffers and plain attributes), addresses (bound Tensor.data_ptr) and attributes (Tensor.requires_grad).
// No CUDA, no torch.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "register.h"

namespace lorakernels {

inline bool is_plain(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

// The same object, or equal plain values: an attribute may be assigned anew without having changed.
inline bool unchanged(PyObject* before, PyObject* now) {
  if (before == now) return true;
  if (Py_TYPE(before) != Py_TYPE(now) || !is_plain(before)) return false;
  const int equal = PyObject_RichCompareBool(before, now, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

// CPython 3.10 to 3.12 give a dict a new number whenever anything in it is set, added or removed; 0 elsewhere.
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

// The getter that looking the name up in the type would find: a data descriptor, which comes before the instance's
// dict. Null if the type has a way of its own.
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

// The T of a bound object; null before its constructor is through, which is when it is tracked already.
template <typename T>
T* held(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  const bool made = instance->simple_layout && instance->simple_holder_constructed;
  return made ? static_cast<T*>(instance->simple_value_holder[0]) : nullptr;
}

struct Entry {
  py::object key, value;
  bool watched;
};

struct WatchedDict {
  py::dict dict;
  std::vector<Entry> entries;
  bool exact;                         // no entry may come or go
  mutable uint64_t unchanged_at = 0;  // the dict's version when it was last found the same

  bool same() const {
    const uint64_t version = version_of(dict.ptr());
    if (version != 0 && version == unchanged_at) return true;
    if (!compare()) return false;
    unchanged_at = version;
    return true;
  }

  bool compare() const {
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

// For py::class_<T>: lets the garbage collector see what a T holds, for T holds what in the end holds it (layers, and
// with them the graphs). T::traverse visits every object that it owns a reference to, T::clear lets go of them; a
// cleared T is still there to be called, and must not answer that all is well.
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

  void add_address(const py::object& data_ptr, uint64_t expected) {
    // A bound C method without arguments is called as what it is, without Python's calling convention around it.
    const bool plain = PyCFunction_CheckExact(data_ptr.ptr()) && PyCFunction_GetFlags(data_ptr.ptr()) == METH_NOARGS;
    addresses_.push_back({data_ptr, plain ? PyCFunction_GetFunction(data_ptr.ptr()) : nullptr, expected});
  }

  void add_attribute(const py::object& owner, const py::str& name, const py::object& expected) {
    attributes_.push_back({owner, name, expected, getter_of(owner.ptr(), name.ptr())});
  }

  // -1, or the number of the first thing that changed: dicts first, then addresses, then attributes, as added.
  int64_t check() const {
    if (cleared_) throw std::runtime_error("Watch.check: the garbage collector has cleared it");
    int64_t index = 0;
    for (const WatchedDict& watched : dicts_) {
      if (!watched.same()) return index;
      ++index;
    }
    for (const auto& [data_ptr, function, expected] : addresses_) {
      const py::object now =
          py::reinterpret_steal<py::object>(function != nullptr ? function(PyCFunction_GetSelf(data_ptr.ptr()), nullptr)
                                                                : PyObject_CallNoArgs(data_ptr.ptr()));
      if (!now) throw py::error_already_set();
      if (PyLong_AsUnsignedLongLongMask(now.ptr()) != expected) return index;
      ++index;
    }
    for (const Attribute& attribute : attributes_) {
      const py::object now = get(attribute.owner.ptr(), attribute.name.ptr(), attribute.getter);
      if (!unchanged(attribute.expected.ptr(), now.ptr())) return index;
      ++index;
    }
    return -1;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const WatchedDict& watched : dicts_) {
      Py_VISIT(watched.dict.ptr());
      for (const Entry& entry : watched.entries) {
        Py_VISIT(entry.key.ptr());
        Py_VISIT(entry.value.ptr());
      }
    }
    for (const Address& address : addresses_) Py_VISIT(address.data_ptr.ptr());
    for (const Attribute& attribute : attributes_) {
      Py_VISIT(attribute.owner.ptr());
      Py_VISIT(attribute.name.ptr());
      Py_VISIT(attribute.expected.ptr());
    }
    return 0;
  }

  void clear() {  // out of the members first: what dies then may run Python code
    cleared_ = true;
    const auto dicts = std::exchange(dicts_, {});
    const auto addresses = std::exchange(addresses_, {});
    const auto attributes = std::exchange(attributes_, {});
  }

 private:
  struct Attribute {
    py::object owner, name, expected;
    const PyGetSetDef* getter;
  };
  struct Address {
    py::object data_ptr;
    PyCFunction function;
    uint64_t expected;
  };
  std::vector<WatchedDict> dicts_;
  std::vector<Address> addresses_;
  std::vector<Attribute> attributes_;
  bool cleared_ = false;
};

}  // namespace lorakernels
