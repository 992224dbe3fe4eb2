// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/quantize_lora_down/params.h"

namespace lorakernels::quantize_lora_down {
namespace {

using Limits = QuantizeLoraDownLimits;

struct Out {
  Address x8, scale_inv, s, workspace;

  static constexpr auto members() { return in_order(&Out::x8, &Out::scale_inv, &Out::s, &Out::workspace); }
};

struct Types {
  std::string dtype, a_dtype;
  std::optional<bool> power_of_two;  // given: each 1 × 128 of x has a scale, rounded so

  static constexpr auto members() { return in_order(&Types::dtype, &Types::a_dtype, &Types::power_of_two); }
};

void check(uintptr_t addresses, const RankSizes& sizes, FloatType dtype, uint32_t first_col) {
  const auto [rows, cols, rank] = sizes;
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
  if (addresses % 16 != 0) {
    throw std::invalid_argument("quantize_lora_down: x, x8, lora_A and workspace must be 16-byte aligned");
  }
  if (dtype == FloatType::kFloat32) {
    throw std::invalid_argument("quantize_lora_down: dtype must be 'bfloat16' or 'float16', got 'float32'");
  }
}

void quantize_lora_down(const Out& out, Address x, Address lora_A, const Scale& scale, const RankSizes& sizes,
                        const Types& types, const std::optional<Dropout>& dropout, const Where& where) {
  const auto& [dtype, a_dtype, power_of_two] = types;
  const FloatType type = float_type("dtype", dtype);
  const DropoutParams draw = params_of(dropout);
  check(x.value | out.x8.value | lora_A.value | out.workspace.value, sizes, type, draw.first_col);
  if (a_dtype != dtype && a_dtype != "float32") {
    throw std::invalid_argument("quantize_lora_down: a_dtype must be '" + dtype + "' or 'float32', got '" + a_dtype +
                                "'");
  }
  const QuantizeLoraDownParams params{out.x8.as<uint8_t>(),
                                      out.scale_inv.as<float>(),
                                      scale.amax.as<float>(),
                                      out.s.as<void>(),
                                      out.workspace.as<float>(),
                                      x.as<const void>(),
                                      lora_A.as<const void>(),
                                      scale.kept.as<const float>(),
                                      sizes.rows,
                                      sizes.cols,
                                      sizes.rank,
                                      sizes.rank,
                                      type,
                                      float_type("a_dtype", a_dtype),
                                      power_of_two.has_value(),
                                      power_of_two.value_or(false),
                                      draw};
  submit("quantize_lora_down", params, &launch_quantize_lora_down, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
  add_limits(m, "quantize_lora_down",
             py::dict(py::arg("rank") = Limits::kRank, py::arg("cols_multiple") = Limits::kColsMultiple));
  m.def(
      "quantize_lora_down_workspace",
      [](int64_t rows, int64_t cols, int64_t rank, int device) {
        return quantize_lora_down_plan(rows, cols, rank, device).floats;
      },
      py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("device"),
      "How many fp32 elements `workspace` must have");
  m.def(
      "quantize_lora_down_finds_blocks",
      [](int64_t rows, int64_t cols, int64_t rank, int device) {
        return quantize_lora_down_plan(rows, cols, rank, device).has_whole_blocks();
      },
      py::arg("rows"), py::arg("cols"), py::arg("rank"), py::arg("device"),
      "Whether its kernel for these sizes takes power_of_two");
  m.def("quantize_lora_down", &quantize_lora_down, py::arg("out"), py::arg("x"), py::arg("lora_A"), py::arg("scale"),
        py::arg("sizes"), py::arg("types"), py::arg("dropout"), py::arg("where"));
}

}  // namespace lorakernels::quantize_lora_down
