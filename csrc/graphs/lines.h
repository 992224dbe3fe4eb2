// SPDX-License-Identifier: Apache-2.0
// Which cache lines a comparison reads. What a replay compares lies all over the heap, and other work has taken the
// caches since: each line would be waited for in turn. `fetch` asks for all of them at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "graphs/python.h"

namespace lorakernels {

class Lines {
 public:
  // The lines of `bytes` bytes. They are never read here, so that they need not stay allocated.
  void add(const void* start, size_t bytes) {
    const auto first = reinterpret_cast<uintptr_t>(start);
    for (uintptr_t line = first / kLine * kLine; line < first + bytes; line += kLine) {
      if (std::find(lines_.begin(), lines_.end(), line) == lines_.end()) lines_.push_back(line);
    }
  }

  // A tensor's object in Python, and the objects behind it and behind its storage, where these say their addresses.
  void add_tensor(const py::handle& tensor) {
    add(tensor.ptr(), kObject);
    if (!add_data_of(tensor, kTensor)) return;
    try {
      add_data_of(tensor.attr("untyped_storage")(), kStorage);
    } catch (py::error_already_set&) {  // a tensor without a storage
    }
  }

  void fetch() const {
    for (const uintptr_t line : lines_) __builtin_prefetch(reinterpret_cast<const void*>(line));
  }

 private:
  // Bytes, of what torch 2.9 to 2.13 read of each for an address, a gradient or a flag.
  static constexpr size_t kLine = 64, kObject = 48, kTensor = 176, kStorage = 48;

  bool add_data_of(const py::handle& owner, size_t bytes) {
    const py::object address = py::getattr(owner, "_cdata", py::none());
    if (!py::isinstance<py::int_>(address)) return false;
    add(reinterpret_cast<const void*>(address.cast<uintptr_t>()), bytes);
    return true;
  }

  std::vector<uintptr_t> lines_;
};

}  // namespace lorakernels
