// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "host/launch_list.h"
#include "ops/lora_grad_a/params.h"
#include "register.h"

namespace lorakernels {
namespace {

using Limits = LoraGradALimits;

void check_shape(int64_t rows, int64_t cols, int64_t rank) {
  check_sizes("lora_grad_a", {{"rows", rows}, {"cols", cols}, {"rank", rank}});
  constexpr int64_t kMost = (int64_t{1} << 31) - (1 << 16);
  if (rows > kMost || cols > kMost || cols % Limits::kColsMultiple != 0 || rank < 1 || rank > Limits::kRank) {
    throw std::invalid_argument("lora_grad_a: cols must be a multiple of " + std::to_string(Limits::kColsMultiple) +
                                ", rank 1 to " + std::to_string(Limits::kRank) + ", rows and cols at most " +
                                std::to_string(kMost) + "; got rows " + std::to_string(rows) + ", cols " +
                                std::to_string(cols) + ", rank " + std::to_string(rank));
  }
}

void check_layout(uintptr_t addresses, int64_t cols, int64_t ds_pitch, uint32_t first_col, bool fp8) {
  if (addresses % 16 != 0) {
    throw std::invalid_argument("lora_grad_a: dA, partial, ds, x and dropped must be 16-byte aligned");
  }
  if (fp8 && cols % Limits::kFp8ColsMultiple != 0) {
    throw std::invalid_argument("lora_grad_a: cols must be a multiple of " + std::to_string(Limits::kFp8ColsMultiple) +
                                " with scale_inv, got " + std::to_string(cols));
  }
  if (ds_pitch % 8 != 0) {
    throw std::invalid_argument("lora_grad_a: ds_pitch must be a multiple of 8, got " + std::to_string(ds_pitch));
  }
  if (first_col % Limits::kColsMultiple != 0) {
    throw std::invalid_argument("lora_grad_a: first_col must be a multiple of " +
                                std::to_string(Limits::kColsMultiple) + ", got " + std::to_string(first_col));
  }
}

void lora_grad_a(uintptr_t dA, uintptr_t partial, uintptr_t ds, uintptr_t x, uintptr_t scale_inv, int64_t rows,
                 int64_t cols, int64_t rank, int64_t ds_pitch, const std::string& dtype, const std::string& out_dtype,
                 uintptr_t slot, uint32_t site, uint32_t threshold, uint32_t first_row, uint32_t first_col,
                 uintptr_t dropped, uintptr_t stream, int device) {
  check_shape(rows, cols, rank);
  check_layout(dA | partial | ds | x | dropped, cols, ds_pitch, first_col, scale_inv != 0);
  const LoraGradAParams params{reinterpret_cast<void*>(dA),
                               reinterpret_cast<float*>(partial),
                               reinterpret_cast<const void*>(ds),
                               reinterpret_cast<const void*>(x),
                               reinterpret_cast<const float*>(scale_inv),
                               rows,
                               cols,
                               rank,
                               ds_pitch,
                               half_type("dtype", dtype),
                               float_type("out_dtype", out_dtype),
                               dropout_params(slot, site, threshold, first_row, first_col),
                               reinterpret_cast<const uint32_t*>(dropped)};
  submit("lora_grad_a", params, &launch_lora_grad_a, stream, device);
}

}  // namespace

void register_lora_grad_a(py::module_& m) {
  add_limits(m, "lora_grad_a",
             py::dict(py::arg("rank") = Limits::kRank, py::arg("cols_multiple") = Limits::kColsMultiple,
                      py::arg("fp8_cols_multiple") = Limits::kFp8ColsMultiple));
  m.def(
      "lora_grad_a_partial",
      [](int64_t rows, int64_t cols, int64_t rank, int64_t multiprocessors) {
        check_shape(rows, cols, rank);
        check_multiprocessors("lora_grad_a_partial", multiprocessors);
        return LoraGradAGrid(rows, cols, rank, multiprocessors).slices * rank * cols;
      },
      py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("multiprocessors"),
      "How many fp32 elements `partial` must have");
  m.def("lora_grad_a", &lora_grad_a, py::arg("dA"), py::arg("partial"), py::arg("ds"), py::arg("x"),
        py::arg("scale_inv"), py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("ds_pitch"), py::arg("dtype"),
        py::arg("out_dtype"), py::arg("slot"), py::arg("site"), py::arg("threshold"), py::arg("first_row"),
        py::arg("first_col"), py::arg("dropped"), py::arg("stream"), py::arg("device"),
        "Device addresses, 0 for a tensor that is not there");
}

}  // namespace lorakernels
