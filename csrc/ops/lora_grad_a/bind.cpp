// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/lora_grad_a/params.h"

namespace lorakernels::lora_grad_a {
namespace {

using Limits = LoraGradALimits;

struct Out {
  Address dA, partial;

  static constexpr auto members() { return in_order(&Out::dA, &Out::partial); }
};

struct Factors {
  Address data, scale_inv;
  bool in_blocks;  // scale_inv, which is given, has one for each 1 × 128

  static constexpr auto members() { return in_order(&Factors::data, &Factors::scale_inv, &Factors::in_blocks); }
};

struct Rows {
  Address data;
  int64_t pitch;  // elements between two rows

  static constexpr auto members() { return in_order(&Rows::data, &Rows::pitch); }
};

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
    throw std::invalid_argument("lora_grad_a: col0 must be a multiple of " + std::to_string(Limits::kColsMultiple) +
                                ", got " + std::to_string(first_col));
  }
}

void lora_grad_a(const Out& out, const Rows& ds, const Factors& x, const RankSizes& sizes, const Dtypes& dtypes,
                 const std::optional<Dropout>& dropout, const Where& where) {
  const auto [rows, cols, rank] = sizes;
  const Address dropped = dropout ? dropout->dropped : Address{};
  const DropoutParams draw = params_of(dropout);
  check_shape(rows, cols, rank);
  check_layout(out.dA.value | out.partial.value | ds.data.value | x.data.value | dropped.value, cols, ds.pitch,
               draw.first_col, x.scale_inv.value != 0);
  const LoraGradAParams params{
      {out.dA.as<void>(), out.partial.as<float>(), ds.data.as<const void>(), x.data.as<const void>(),
       x.scale_inv.as<const float>(), rows, cols, rank, ds.pitch, half_type("dtype", dtypes.first),
       float_type("out_dtype", dtypes.second), draw, dropped.as<const uint32_t>(), x.in_blocks},
      draw.rows};
  submit("lora_grad_a", params, &launch_lora_grad_a, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
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
  m.def("lora_grad_a", &lora_grad_a, py::arg("out"), py::arg("ds"), py::arg("x"), py::arg("sizes"), py::arg("dtypes"),
        py::arg("dropout"), py::arg("where"));
}

}  // namespace lorakernels::lora_grad_a
