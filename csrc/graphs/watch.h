// SPDX-License-Identifier: Apache-2.0
// What a replay relies on in Python, compared before every launch in a microsecond or two. It is entries of dicts (a
// module's parameters, buffers and plain attributes), addresses (bound Tensor.data_ptr) and attributes
// (Tensor.requires_grad). There is no CUDA and no torch here.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "graphs/python.h"

namespace lorakernels {

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

class Watch {
 public:
  // keys: the entries to watch. None: all entries, and that none is added or removed.
  void add_dict(const py::dict& dict, const py::object& keys) {
    WatchedDict watched{dict, {}, keys.is_none()};
    for (const auto& item : dict) {
      const bool counts = keys.is_none() || keys.contains(item.first);
      // No reference is held to the value of an entry that is not watched.
      watched.entries.push_back({py::reinterpret_borrow<py::object>(item.first),
                                 counts ? py::reinterpret_borrow<py::object>(item.second) : py::none(), counts});
    }
    dicts_.push_back(std::move(watched));
  }

  void add_address(const py::object& data_ptr, uint64_t expected) {
    // The C function of a bound method without arguments is called directly, which is faster than through Python.
    const bool plain = PyCFunction_CheckExact(data_ptr.ptr()) && PyCFunction_GetFlags(data_ptr.ptr()) == METH_NOARGS;
    addresses_.push_back({data_ptr, plain ? PyCFunction_GetFunction(data_ptr.ptr()) : nullptr, expected});
  }

  void add_attribute(const py::object& owner, const py::str& name, const py::object& expected) {
    attributes_.push_back({owner, name, expected, getter_of(owner.ptr(), name.ptr())});
  }

  // -1, or the number of the first thing that changed. Numbers count dicts, then addresses, then attributes, as added.
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

  void clear() {  // the members are emptied first, because an object's end may run Python code
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
