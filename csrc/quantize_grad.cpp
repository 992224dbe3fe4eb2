// SPDX-License-Identifier: Apache-2.0
#include "quantize_grad.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "register.h"

namespace lorakernels {
namespace {

void check_shape(int64_t rows, int64_t cols, int64_t rank) {
  check_sizes("quantize_grad", {{"rows", rows}, {"cols", cols}, {"rank", rank}});
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024;
  if (cols % 8 != 0 || cols > kMost || rows > kMost || rank > 128) {
    throw std::invalid_argument(
        "quantize_grad: cols must be a multiple of 8, rank at most 128, rows and cols at most " +
        std::to_string(kMost) + "; got rows " + std::to_string(rows) + ", cols " + std::to_string(cols) + ", rank " +
        std::to_string(rank));
  }
}

using WidthsAndRanks = std::vector<std::pair<int64_t, int64_t>>;

// None: one projection, of all columns.
QuantizeGradProjections projections_of(const WidthsAndRanks& found, int64_t cols, int64_t rank) {
  if (found.empty()) return QuantizeGradProjections({{cols, rank}});
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("quantize_grad: projections " + why); };
  constexpr int kMost = QuantizeGradProjections::kMost, kMultiple = QuantizeGradProjections::kMultiple;
  if (found.size() > kMost) {
    refuse("must be at most " + std::to_string(kMost) + ", got " + std::to_string(found.size()));
  }
  int64_t columns = 0;
  for (const auto& [width, own_rank] : found) {
    if (columns % kMultiple != 0) refuse("must begin at multiples of " + std::to_string(kMultiple));
    if (width < 0 || width > cols - columns) refuse("must have " + std::to_string(cols) + " columns together");
    if (own_rank != 0 && own_rank != rank) refuse("must have rank 0 or " + std::to_string(rank));
    columns += width;
  }
  if (columns != cols) refuse("must have " + std::to_string(cols) + " columns together");
  return QuantizeGradProjections(found);
}

void quantize_grad(uintptr_t dy8, uintptr_t scale_inv, uintptr_t amax, uintptr_t ds, uintptr_t dB, uintptr_t workspace,
                   uintptr_t dy, uintptr_t B, uintptr_t s, uintptr_t kept, uintptr_t partials, int64_t rows,
                   int64_t cols, int64_t rank, float scaling, const std::string& dtype, const std::string& b_dtype,
                   const std::string& format, float fp8_max, uintptr_t stream, int device,
                   const WidthsAndRanks& projections) {
  check_shape(rows, cols, rank);
  if ((dy | dy8 | workspace) % 16 != 0) {
    throw std::invalid_argument("quantize_grad: dy, dy8 and workspace must be 16-byte aligned");
  }
  const QuantizeGradParams params{
      reinterpret_cast<uint8_t*>(dy8),
      reinterpret_cast<float*>(scale_inv),
      reinterpret_cast<float*>(amax),
      reinterpret_cast<void*>(ds),
      reinterpret_cast<void*>(dB),
      reinterpret_cast<float*>(workspace),
      reinterpret_cast<const void*>(dy),
      reinterpret_cast<const void*>(B),
      reinterpret_cast<const void*>(s),
      {reinterpret_cast<const float*>(kept), reinterpret_cast<uint32_t*>(partials), fp8_max},
      rows,
      cols,
      rank,
      scaling,
      half_type("dtype", dtype),
      float_type("b_dtype", b_dtype),
      is_e5m2("format", format),
      projections_of(projections, cols, rank)};
  launch_quantize_grad(params, reinterpret_cast<void*>(stream), device);
}

}  // namespace

void register_quantize_grad(py::module_& m) {
  m.def(
      "quantize_grad_workspace",
      [](int64_t rows, int64_t cols, int64_t rank, bool has_dB, const WidthsAndRanks& projections) {
        check_shape(rows, cols, rank);
        const auto each = projections_of(projections, cols, rank);
        return rank == 0 ? 0 : QuantizeGradGrid(rows, cols, rank, each).floats(has_dB);
      },
      py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("has_dB"), py::arg("projections") = WidthsAndRanks{},
      "fp32 numbers that quantize_grad needs");
  m.def("quantize_grad", &quantize_grad, py::arg("dy8"), py::arg("scale_inv"), py::arg("amax"), py::arg("ds"),
        py::arg("dB"), py::arg("workspace"), py::arg("dy"), py::arg("B"), py::arg("s"), py::arg("kept"),
        py::arg("partials"), py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("scaling"), py::arg("dtype"),
        py::arg("b_dtype"), py::arg("format"), py::arg("fp8_max"), py::arg("stream"), py::arg("device"),
        py::arg("projections") = WidthsAndRanks{}, "Device addresses, 0 for a tensor that is not there");
}

}  // namespace lorakernels
