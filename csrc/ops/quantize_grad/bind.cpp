// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/quantize_grad/params.h"

namespace lorakernels::quantize_grad {
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

struct Out {
  Address dy8, scale_inv, ds, dB, workspace;

  static constexpr auto members() { return in_order(&Out::dy8, &Out::scale_inv, &Out::ds, &Out::dB, &Out::workspace); }
};

struct ProjectionSizes {
  int64_t rows, cols, rank;
  WidthsAndRanks projections;  // none: one of all columns

  static constexpr auto members() {
    return in_order(&ProjectionSizes::rows, &ProjectionSizes::cols, &ProjectionSizes::rank,
                    &ProjectionSizes::projections);
  }
};

struct Types {
  std::string dtype, b_dtype, format;
  float fp8_max;
  std::optional<bool> power_of_two;  // given: each 1 × 128 of dy has a scale, rounded so

  static constexpr auto members() {
    return in_order(&Types::dtype, &Types::b_dtype, &Types::format, &Types::fp8_max, &Types::power_of_two);
  }
};

// A mask of `cols` columns, to be drawn into `dropout.dropped`.
struct Mask {
  Dropout dropout;
  int64_t cols;

  static constexpr auto members() { return in_order(&Mask::dropout, &Mask::cols); }
};

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

void check_mask(int64_t rank, const Mask& mask, const DropoutParams& draw) {
  check_sizes("quantize_grad", {{"dropped_cols", mask.cols}});
  if (rank < 1 || rank > Limits::kDrawnRank || draw.threshold == 0 || draw.first_col % Limits::kColsMultiple != 0 ||
      mask.cols >= int64_t{1} << 31) {
    throw std::invalid_argument("quantize_grad: a mask takes a rank of 1 to " + std::to_string(Limits::kDrawnRank) +
                                ", a p above 0, col0 a multiple of 8, dropped_cols below 2^31; got rank " +
                                std::to_string(rank) + ", p " + std::to_string(mask.dropout.p) + ", col0 " +
                                std::to_string(draw.first_col) + ", dropped_cols " + std::to_string(mask.cols));
  }
}

void quantize_grad(const Out& out, Address dy, const std::optional<Up>& up, const Scale& scale,
                   const ProjectionSizes& sizes, const Types& types, const std::optional<Mask>& mask,
                   const Where& where) {
  const auto& [rows, cols, rank, projections] = sizes;
  check_shape(rows, cols, rank);
  const Up factors = up.value_or(Up{});
  const Address dropped = mask ? mask->dropout.dropped : Address{};
  const DropoutParams draw = mask ? params_of(mask->dropout) : DropoutParams{};
  if ((dy.value | out.dy8.value | out.workspace.value | dropped.value) % 16 != 0) {
    throw std::invalid_argument("quantize_grad: dy, dy8, workspace and dropped must be 16-byte aligned");
  }
  if (types.power_of_two && cols % Limits::kBlockColsMultiple != 0) {
    throw std::invalid_argument("quantize_grad: cols must be a multiple of " +
                                std::to_string(Limits::kBlockColsMultiple) + " where blocks have scales; got " +
                                std::to_string(cols));
  }
  if (dropped.value != 0) check_mask(rank, *mask, draw);
  const QuantizeGradParams params{out.dy8.as<uint8_t>(),
                                  out.scale_inv.as<float>(),
                                  scale.amax.as<float>(),
                                  out.ds.as<void>(),
                                  out.dB.as<void>(),
                                  out.workspace.as<float>(),
                                  dy.as<const void>(),
                                  factors.B.as<const void>(),
                                  factors.s.as<const void>(),
                                  {scale.kept.as<const float>(), scale.partials.as<uint32_t>(), types.fp8_max},
                                  rows,
                                  cols,
                                  rank,
                                  factors.scaling,
                                  half_type("dtype", types.dtype),
                                  float_type("b_dtype", types.b_dtype),
                                  is_e5m2("format", types.format),
                                  types.power_of_two.has_value(),
                                  types.power_of_two.value_or(false),
                                  projections_of(projections, cols, rank),
                                  dropped.as<uint32_t>(),
                                  mask ? mask->cols : 0,
                                  draw};
  submit("quantize_grad", params, &launch_quantize_grad, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
  add_limits(m, "quantize_grad",
             py::dict(py::arg("rank") = Limits::kRank, py::arg("drawn_rank") = Limits::kDrawnRank,
                      py::arg("cols_multiple") = Limits::kColsMultiple,
                      py::arg("block_cols_multiple") = Limits::kBlockColsMultiple,
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
  m.def("quantize_grad", &quantize_grad, py::arg("out"), py::arg("dy"), py::arg("up"), py::arg("scale"),
        py::arg("sizes"), py::arg("types"), py::arg("mask"), py::arg("where"));
}

}  // namespace lorakernels::quantize_grad
