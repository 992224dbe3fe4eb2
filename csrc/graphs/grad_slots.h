// SPDX-License-Identifier: Apache-2.0
// Where are the parameters' gradients? There is no CUDA and no torch here.
#pragma once

#include <utility>
#include <vector>

#include "graphs/watch.h"

namespace lorakernels {

// The gradients of parameters. Each of `targets` has a `parameter`, the `grad` in a shared block of memory that a
// replay writes, and the number of `references` to that.
class GradSlots {
 public:
  enum State { kInstalled = 0, kFree = 1, kOther = 2 };

  explicit GradSlots(const py::list& targets) {
    for (const py::handle target : targets) {
      const py::object parameter = target.attr("parameter"), grad = target.attr("grad");
      slots_.push_back(
          {py::reinterpret_borrow<py::object>(target), parameter, grad, getter_of(parameter.ptr(), grad_.ptr())});
    }
  }

  // kInstalled: each `parameter.grad` is `grad`. kFree: each is None, and no other code holds a `grad`. A `grad` then
  // has at most `references` references, counted as sys.getrefcount counts them, with its own argument.
  int state() const {
    if (cleared_) throw std::runtime_error("GradSlots.state: the garbage collector has cleared it");
    size_t installed = 0;
    for (const Slot& slot : slots_) {
      const py::object now = get(slot.parameter.ptr(), grad_.ptr(), slot.getter);
      if (now.ptr() == slot.grad.ptr()) {
        ++installed;
      } else if (installed > 0 || now.ptr() != Py_None || Py_REFCNT(slot.grad.ptr()) + 1 > references(slot)) {
        return kOther;
      }
    }
    return installed == slots_.size() ? kInstalled : installed == 0 ? kFree : kOther;
  }

  void install() const {
    for (const Slot& slot : slots_) {
      PyObject* parameter = slot.parameter.ptr();
      const bool plain = slot.getter != nullptr && slot.getter->set != nullptr &&
                         Py_TYPE(parameter)->tp_setattro == PyObject_GenericSetAttr;
      const int failed = plain ? slot.getter->set(parameter, slot.grad.ptr(), slot.getter->closure)
                               : PyObject_SetAttr(parameter, grad_.ptr(), slot.grad.ptr());
      if (failed != 0) throw py::error_already_set();
    }
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Slot& slot : slots_) {
      Py_VISIT(slot.target.ptr());
      Py_VISIT(slot.parameter.ptr());
      Py_VISIT(slot.grad.ptr());
    }
    return 0;
  }

  void clear() {
    cleared_ = true;
    const auto slots = std::exchange(slots_, {});
  }

 private:
  struct Slot {
    py::object target, parameter, grad;
    const PyGetSetDef* getter;
  };

  Py_ssize_t references(const Slot& slot) const {
    return PyLong_AsSsize_t(get(slot.target.ptr(), references_.ptr(), nullptr).ptr());
  }

  py::object grad_ = interned("grad"), references_ = interned("references");
  std::vector<Slot> slots_;
  bool cleared_ = false;
};

}  // namespace lorakernels
