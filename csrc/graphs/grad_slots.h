// SPDX-License-Identifier: Apache-2.0
// Where are the parameters' gradients? There is no CUDA and no torch here: tensors are asked as Python asks them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "graphs/watch.h"

namespace lorakernels {

// The gradient memory of one parameter. Here is the manager's only reference to the tensor, so that any other shows in
// the tensor's reference count.
struct GradTarget {
  py::object parameter, grad;
  std::string kind;  // "main" (`parameter.main_grad`), "given" (`.grad`, which other code holds too), "own" (in a slab)
  bool zeroed = false;  // the memory is zero already, and `.grad` is None

  // Whether other code holds the tensor. Asked while it is not `.grad`.
  bool held() const { return kind != "own" || Py_REFCNT(grad.ptr()) > 1; }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(parameter.ptr());
    Py_VISIT(grad.ptr());
    return 0;
  }

  void clear() {}  // GradSlots uses what is here until it is cleared itself
};

// The gradients that one graph adds to.
class GradSlots {
 public:
  enum State { kInstalled = 0, kFree = 1, kOther = 2 };

  // targets: of GradTarget. slabs: (callable, argument, expected): how many tensors hold a slab's storage. watch: of
  // what else must be as it was.
  GradSlots(const py::list& targets, const py::list& slabs, const py::object& watch)
      : watch_object_(watch), watch_(&watch.cast<const Watch&>()) {
    for (const py::handle one : targets) {
      auto& target = one.cast<GradTarget&>();
      PyObject *parameter = target.parameter.ptr(), *grad = target.grad.ptr();
      const auto data_ptr = method_of(grad, data_ptr_.ptr());
      const py::object address = call(grad, data_ptr_.ptr(), data_ptr);
      slots_.push_back({py::reinterpret_borrow<py::object>(one), &target, target.kind == "main", target.kind == "own",
                        getter_of(parameter, grad_.ptr()), data_ptr, PyLong_AsUnsignedLongLongMask(address.ptr())});
    }
    for (const py::handle slab : slabs) {
      slabs_.push_back({slab[py::int_(0)], slab[py::int_(1)], slab[py::int_(2)].cast<Py_ssize_t>()});
    }
  }

  // Whether the graph may be launched: every gradient is where it was and is installed, and nothing else has changed.
  // If all are None, nobody's and zeroed, they are installed first.
  bool ready() const {
    if (cleared_) throw std::runtime_error("GradSlots.ready: the garbage collector has cleared it");
    if (watch_->check() >= 0 || moved() >= 0) return false;
    const int found = state();
    if (found != kFree) return found == kInstalled;
    for (const Slot& slot : slots_) {
      if (!slot.main && !(slot.own && slot.target->zeroed)) return false;
    }
    if (!alone()) return false;
    install();
    return true;
  }

  // The number of the first target whose memory is elsewhere, or whose `main_grad` is another tensor; -1 if none is.
  int64_t moved() const {
    int64_t index = 0;
    for (const Slot& slot : slots_) {
      const py::object now = call(slot.target->grad.ptr(), data_ptr_.ptr(), slot.data_ptr);
      if (PyLong_AsUnsignedLongLongMask(now.ptr()) != slot.address) return index;
      if (slot.main) {
        const auto main =
            py::reinterpret_steal<py::object>(PyObject_GetAttr(slot.target->parameter.ptr(), main_grad_.ptr()));
        PyErr_Clear();
        if (main.ptr() != slot.target->grad.ptr()) return index;
      }
      ++index;
    }
    return -1;
  }

  // Of the gradients that are no `main_grad`. kInstalled: each is its parameter's `.grad`. kFree: each `.grad` is None,
  // and nobody else holds one of ours as an object.
  int state() const {
    if (cleared_) throw std::runtime_error("GradSlots.state: the garbage collector has cleared it");
    size_t installed = 0, others = 0;
    for (const Slot& slot : slots_) {
      if (slot.main) continue;
      const GradTarget& target = *slot.target;
      const py::object now = get(target.parameter.ptr(), grad_.ptr(), slot.getter);
      if (now.ptr() == target.grad.ptr()) {
        ++installed;
      } else if (now.is_none() && slot.own && Py_REFCNT(target.grad.ptr()) == 1) {
        ++others;
      } else {
        return kOther;
      }
    }
    return others == 0 ? kInstalled : installed == 0 ? kFree : kOther;
  }

  // Notes for all targets that their memory is zero and no `.grad`, or that this is no longer so.
  void set_zeroed(bool zeroed) const {
    for (const Slot& slot : slots_) slot.target->zeroed = zeroed;
  }

  // Whether no other code has a view of a slab.
  bool alone() const {
    for (const Slab& slab : slabs_) {
      const py::object uses = owned(PyObject_CallOneArg(slab.count.ptr(), slab.storage.ptr()));
      if (PyLong_AsSsize_t(uses.ptr()) > slab.uses) return false;
    }
    return true;
  }

  // Makes each gradient its parameter's `.grad`.
  void install() const {
    for (const Slot& slot : slots_) {
      if (slot.main) continue;
      PyObject *parameter = slot.target->parameter.ptr(), *grad = slot.target->grad.ptr();
      const bool plain = slot.getter != nullptr && slot.getter->set != nullptr &&
                         Py_TYPE(parameter)->tp_setattro == PyObject_GenericSetAttr;
      const int failed = plain ? slot.getter->set(parameter, grad, slot.getter->closure)
                               : PyObject_SetAttr(parameter, grad_.ptr(), grad);
      if (failed != 0) throw py::error_already_set();
      slot.target->zeroed = false;
    }
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(watch_object_.ptr());
    for (const Slot& slot : slots_) Py_VISIT(slot.object.ptr());
    for (const Slab& slab : slabs_) {
      Py_VISIT(slab.count.ptr());
      Py_VISIT(slab.storage.ptr());
    }
    return 0;
  }

  void clear() {
    cleared_ = true;
    const auto watch = std::exchange(watch_object_, {});
    const auto slots = std::exchange(slots_, {});
    const auto slabs = std::exchange(slabs_, {});
  }

 private:
  struct Slot {
    py::object object;
    GradTarget* target;  // in `object`
    bool main, own;
    const PyGetSetDef* getter;
    PyCFunction data_ptr;
    uint64_t address;
  };
  struct Slab {
    py::object count, storage;
    Py_ssize_t uses;
  };

  py::object grad_ = interned("grad"), main_grad_ = interned("main_grad"), data_ptr_ = interned("data_ptr");
  py::object watch_object_;
  const Watch* watch_;
  std::vector<Slot> slots_;
  std::vector<Slab> slabs_;
  bool cleared_ = false;
};

}  // namespace lorakernels
