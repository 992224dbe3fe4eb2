// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "host/launch_list.h"
#include "ops/quantize_grad/params.h"
#include "register.h"

namespace lorakernels {
namespace {

using Limits = QuantizeGradLimits;

void check_shape(int64_t rows, int64_t cols, int64_t rank) {
  check_sizes("quantize_grad", {{"rows", rows}, {"cols", cols}, {"rank", rank}});
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024;
  if (cols % Limits::kColsMultiple != 0 || cols > kMost || rows > kMost || rank > Limits::kRank) {
    throw std::invalid_argument("quantize_grad: cols must be a multiple of " + std::to_string(Limits::kColsMultiple) +
                                ", rank at most " + std::to_string(Limits::kRank) + ", rows and cols at most " +
                                std::to_string(kMost) + "; got rows " + std::to_string(rows) + ", cols " +
                                std::to_string(cols) + ", rank " + std::to_string(rank));
  }
}

using WidthsAndRanks = std::vector<std::pair<int64_t, int64_t>>;

// Without any, there is one projection that has all columns.
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

void check_mask(int64_t rank, int64_t cols, uint32_t threshold, uint32_t first_col) {
  check_sizes("quantize_grad", {{"dropped_cols", cols}});
  if (rank < 1 || rank > Limits::kDrawnRank || threshold == 0 || first_col % Limits::kColsMultiple != 0 ||
      cols >= int64_t{1} << 31) {
    throw std::invalid_argument("quantize_grad: a mask takes a rank of 1 to " + std::to_string(Limits::kDrawnRank) +
                                ", a threshold above 0, first_col a multiple of 8, dropped_cols below 2^31; got rank " +
                                std::to_string(rank) + ", threshold " + std::to_string(threshold) + ", first_col " +
                                std::to_string(first_col) + ", dropped_cols " + std::to_string(cols));
  }
}

void quantize_grad(uintptr_t dy8, uintptr_t scale_inv, uintptr_t amax, uintptr_t ds, uintptr_t dB, uintptr_t workspace,
                   uintptr_t dy, uintptr_t B, uintptr_t s, uintptr_t kept, uintptr_t partials, int64_t rows,
                   int64_t cols, int64_t rank, float scaling, const std::string& dtype, const std::string& b_dtype,
                   const std::string& format, float fp8_max, uintptr_t dropped, int64_t dropped_cols, uintptr_t slot,
                   uint32_t site, uint32_t threshold, uint32_t first_row, uint32_t first_col, uintptr_t stream,
                   int device, const WidthsAndRanks& projections) {
  check_shape(rows, cols, rank);
  if ((dy | dy8 | workspace | dropped) % 16 != 0) {
    throw std::invalid_argument("quantize_grad: dy, dy8, workspace and dropped must be 16-byte aligned");
  }
  if (dropped != 0) check_mask(rank, dropped_cols, threshold, first_col);
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
      projections_of(projections, cols, rank),
      reinterpret_cast<uint32_t*>(dropped),
      dropped_cols,
      dropout_params(slot, site, threshold, first_row, first_col)};
  submit("quantize_grad", params, &launch_quantize_grad, stream, device);
}

}  // namespace

void register_quantize_grad(py::module_& m) {
  add_limits(m, "quantize_grad",
             py::dict(py::arg("rank") = Limits::kRank, py::arg("drawn_rank") = Limits::kDrawnRank,
                      py::arg("cols_multiple") = Limits::kColsMultiple,
                      py::arg("projections") = QuantizeGradProjections::kMost,
                      py::arg("projection_multiple") = QuantizeGradProjections::kMultiple));
  m.def(
      "quantize_grad_workspace",
      [](int64_t rows, int64_t cols, int64_t rank, bool has_dB, int64_t multiprocessors,
         const WidthsAndRanks& projections) {
        check_shape(rows, cols, rank);
        check_multiprocessors("quantize_grad_workspace", multiprocessors);
        const auto each = projections_of(projections, cols, rank);
        return rank == 0 ? 0 : QuantizeGradGrid(rows, cols, rank, each, multiprocessors).floats(has_dB);
      },
      py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("has_dB"), py::arg("multiprocessors"),
      py::arg("projections") = WidthsAndRanks{}, "fp32 numbers that quantize_grad needs");
  m.def("quantize_grad", &quantize_grad, py::arg("dy8"), py::arg("scale_inv"), py::arg("amax"), py::arg("ds"),
        py::arg("dB"), py::arg("workspace"), py::arg("dy"), py::arg("B"), py::arg("s"), py::arg("kept"),
        py::arg("partials"), py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("scaling"), py::arg("dtype"),
        py::arg("b_dtype"), py::arg("format"), py::arg("fp8_max"), py::arg("dropped"), py::arg("dropped_cols"),
        py::arg("slot"), py::arg("site"), py::arg("threshold"), py::arg("first_row"), py::arg("first_col"),
        py::arg("stream"), py::arg("device"), py::arg("projections") = WidthsAndRanks{},
        "Device addresses, 0 for a tensor that is not there");
}

}  // namespace lorakernels
