// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "host/launch_list.h"
#include "ops/quantize_lora_down/params.h"
#include "register.h"

namespace lorakernels {
namespace {

using Limits = QuantizeLoraDownLimits;

void check(uintptr_t x, uintptr_t x8, uintptr_t lora_A, uintptr_t workspace, int64_t rows, int64_t cols, int64_t rank,
           FloatType dtype, uint32_t first_col) {
  check_sizes("quantize_lora_down", {{"rows", rows}, {"cols", cols}, {"rank", rank}});
  if (rows >= int64_t{1} << 31 || cols == 0 || cols >= 1 << 24 || cols % Limits::kColsMultiple != 0 ||
      rank > Limits::kRank || first_col % Limits::kColsMultiple != 0) {
    throw std::invalid_argument("quantize_lora_down: rows must be below 2^31, cols a positive multiple of " +
                                std::to_string(Limits::kColsMultiple) + " below 2^24, rank at most " +
                                std::to_string(Limits::kRank) + " and first_col a multiple of " +
                                std::to_string(Limits::kColsMultiple) + "; got rows " + std::to_string(rows) +
                                ", cols " + std::to_string(cols) + ", rank " + std::to_string(rank) + ", first_col " +
                                std::to_string(first_col));
  }
  if ((x | x8 | lora_A | workspace) % 16 != 0) {
    throw std::invalid_argument("quantize_lora_down: x, x8, lora_A and workspace must be 16-byte aligned");
  }
  if (dtype == FloatType::kFloat32) {
    throw std::invalid_argument("quantize_lora_down: dtype must be 'bfloat16' or 'float16', got 'float32'");
  }
}

void quantize_lora_down(uintptr_t x8, uintptr_t scale_inv, uintptr_t amax, uintptr_t s, uintptr_t workspace,
                        uintptr_t x, uintptr_t lora_A, uintptr_t kept, int64_t rows, int64_t cols, int64_t rank,
                        const std::string& dtype, const std::string& a_dtype, uintptr_t slot, uint32_t site,
                        uint32_t threshold, uint32_t first_row, uint32_t first_col, uintptr_t stream, int device) {
  const FloatType type = float_type("dtype", dtype);
  check(x, x8, lora_A, workspace, rows, cols, rank, type, first_col);
  if (a_dtype != dtype && a_dtype != "float32") {
    throw std::invalid_argument("quantize_lora_down: a_dtype must be '" + dtype + "' or 'float32', got '" + a_dtype +
                                "'");
  }
  const QuantizeLoraDownParams params{reinterpret_cast<uint8_t*>(x8),
                                      reinterpret_cast<float*>(scale_inv),
                                      reinterpret_cast<float*>(amax),
                                      reinterpret_cast<void*>(s),
                                      reinterpret_cast<float*>(workspace),
                                      reinterpret_cast<const void*>(x),
                                      reinterpret_cast<const void*>(lora_A),
                                      reinterpret_cast<const float*>(kept),
                                      rows,
                                      cols,
                                      rank,
                                      type,
                                      float_type("a_dtype", a_dtype),
                                      dropout_params(slot, site, threshold, first_row, first_col)};
  submit("quantize_lora_down", params, &launch_quantize_lora_down, stream, device);
}

}  // namespace

void register_quantize_lora_down(py::module_& m) {
  add_limits(m, "quantize_lora_down",
             py::dict(py::arg("rank") = Limits::kRank, py::arg("cols_multiple") = Limits::kColsMultiple));
  m.def(
      "quantize_lora_down_workspace",
      [](int64_t rows, int64_t cols, int64_t rank, int device) {
        return quantize_lora_down_plan(rows, cols, rank, device).floats;
      },
      py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("device"),
      "How many fp32 elements `workspace` must have");
  m.def("quantize_lora_down", &quantize_lora_down, py::arg("x8"), py::arg("scale_inv"), py::arg("amax"), py::arg("s"),
        py::arg("workspace"), py::arg("x"), py::arg("lora_A"), py::arg("kept"), py::arg("rows"), py::arg("cols"),
        py::arg("rank"), py::arg("dtype"), py::arg("a_dtype"), py::arg("slot"), py::arg("site"), py::arg("threshold"),
        py::arg("first_row"), py::arg("first_col"), py::arg("stream"), py::arg("device"),
        "Device addresses, 0 for a tensor that is not there; kept: the scale, taken if it is above 0");
}

}  // namespace lorakernels
