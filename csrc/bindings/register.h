// SPDX-License-Identifier: Apache-2.0
// What every binding file shares. Python checks tensors. Bindings check only what would make a kernel read or write out
// of bounds.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace py = pybind11;

namespace lorakernels {

inline void check_sizes(const char* op, std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  for (const auto& [name, value] : sizes) {
    if (value < 0) {
      throw std::invalid_argument(std::string(op) + ": " + name + " must not be negative, got " +
                                  std::to_string(value));
    }
  }
}

inline void check_multiprocessors(const char* op, int64_t multiprocessors) {
  if (multiprocessors < 1) {
    throw std::invalid_argument(std::string(op) + ": multiprocessors must be at least 1, got " +
                                std::to_string(multiprocessors));
  }
}

// Makes `_C.limits.<op>`, from which Python reads what the op's kernels take. `values` has a number for each name.
inline void add_limits(py::module_& m, const char* op, const py::dict& values) {
  const py::object space = py::module_::import("types").attr("SimpleNamespace");
  if (!py::hasattr(m, "limits")) m.attr("limits") = space();
  m.attr("limits").attr(op) = space(**values);
}

void register_build_info(py::module_& m);
void register_philox(py::module_& m);
void register_fp8(py::module_& m);
void register_graph(py::module_& m);
void register_graph_watch(py::module_& m);
void register_launch_list(py::module_& m);

}  // namespace lorakernels

// Each op's bindings have a namespace of their own, so that one translation unit can hold them all.
namespace lorakernels::amax {
void register_in(py::module_& m);
}
namespace lorakernels::amax_and_scale_update {
void register_in(py::module_& m);
}
namespace lorakernels::bias_dropout_add {
void register_in(py::module_& m);
}
namespace lorakernels::dropout_mask {
void register_in(py::module_& m);
}
namespace lorakernels::fp8_gemm {
void register_in(py::module_& m);
}
namespace lorakernels::longest_document {
void register_in(py::module_& m);
}
namespace lorakernels::lora_grad_a {
void register_in(py::module_& m);
}
namespace lorakernels::quantize_grad {
void register_in(py::module_& m);
}
namespace lorakernels::quantize_lora_down {
void register_in(py::module_& m);
}
namespace lorakernels::transpose_fp8 {
void register_in(py::module_& m);
}
