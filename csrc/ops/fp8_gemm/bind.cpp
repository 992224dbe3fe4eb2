// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/fp8_gemm/params.h"

namespace lorakernels::fp8_gemm {
namespace {

using Limits = Fp8GemmLimits;

struct ProductSizes {
  int64_t rows, cols, depth, rank;
  int64_t segment_rows;                             // 0, or how many rows have an adapter of their own
  std::vector<std::pair<int64_t, int64_t>> blocks;  // columns and ranks of the blocks on B's diagonal; or none

  static constexpr auto members() {
    return in_order(&ProductSizes::rows, &ProductSizes::cols, &ProductSizes::depth, &ProductSizes::rank,
                    &ProductSizes::segment_rows, &ProductSizes::blocks);
  }
};

struct Tiles {
  bool splits;
  int rows, cols;
  int64_t multiprocessors;

  static constexpr auto members() {
    return in_order(&Tiles::splits, &Tiles::rows, &Tiles::cols, &Tiles::multiprocessors);
  }
};

struct LinearOut {
  Address y, bias, residual;

  static constexpr auto members() { return in_order(&LinearOut::y, &LinearOut::bias, &LinearOut::residual); }
};

struct LinearTypes {
  std::string dtype, b_dtype, bias_dtype;
  bool by_column;  // the weight has a scale for each row

  static constexpr auto members() {
    return in_order(&LinearTypes::dtype, &LinearTypes::b_dtype, &LinearTypes::bias_dtype, &LinearTypes::by_column);
  }
};

struct GradOut {
  Address dx, ds, A;

  static constexpr auto members() { return in_order(&GradOut::dx, &GradOut::ds, &GradOut::A); }
};

// The weights of `groups` groups, one after the other, and which rows belong to which group (Fp8GemmParams).
struct GroupedWeight {
  Address data, scale_inv, group_of;
  int64_t groups;

  static constexpr auto members() {
    return in_order(&GroupedWeight::data, &GroupedWeight::scale_inv, &GroupedWeight::group_of, &GroupedWeight::groups);
  }
};

struct GradTypes {
  std::string dtype, a_dtype, format;

  static constexpr auto members() { return in_order(&GradTypes::dtype, &GradTypes::a_dtype, &GradTypes::format); }
};

[[noreturn]] void refuse(const std::string& op, const std::string& what) {
  throw std::invalid_argument(op + ": " + what);
}

void check(const std::string& op, const Fp8GemmParams& params) {
  const auto [rows, cols, depth] = std::tuple{params.rows, params.cols, params.depth};
  check_sizes(op.c_str(), {{"rows", rows},
                           {"cols", cols},
                           {"depth", depth},
                           {"rank", params.rank},
                           {"multiprocessors", params.multiprocessors - 1}});
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  const auto tiles = [](int64_t size) { return (size + 127) / 128; };
  if (cols % Limits::kColsMultiple != 0 || depth % Limits::kDepthMultiple != 0 || depth == 0 || rows > kMost ||
      cols > kMost || depth > kMost || tiles(rows) * tiles(cols) > kMost) {
    refuse(op, "cols must be a multiple of " + std::to_string(Limits::kColsMultiple) + ", depth a positive one of " +
                   std::to_string(Limits::kDepthMultiple) + ", each and the tiles of 128 × 128 at most " +
                   std::to_string(kMost) + "; got rows " + std::to_string(rows) + ", cols " + std::to_string(cols) +
                   ", depth " + std::to_string(depth));
  }
  if (params.groups > 0 &&
      (rows % Limits::kGroupRows != 0 || (params.untransposed && depth % Limits::kGroupRows != 0) ||
       (rows > 0 && params.group_of == nullptr && params.segment_rows == 0) ||
       params.groups > kMost / std::max(cols, depth))) {
    refuse(op, "groups begin at multiples of " + std::to_string(Limits::kGroupRows) +
                   " rows, and so do the matrices of dx; they need group_of, and at most " + std::to_string(kMost) +
                   " rows of matrices; got rows " + std::to_string(rows) + ", depth " + std::to_string(depth) +
                   ", groups " + std::to_string(params.groups));
  }
  if (params.untransposed && cols % Limits::kUntransposedColsMultiple != 0) {
    refuse(op, "a weight that is not transposed takes cols a multiple of " +
                   std::to_string(Limits::kUntransposedColsMultiple) + ", got cols " + std::to_string(cols));
  }
  for (const void* pointer : {static_cast<const void*>(params.out), static_cast<const void*>(params.left),
                              static_cast<const void*>(params.right), params.u, params.v, params.residual,
                              static_cast<const void*>(params.dropped)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) refuse(op, "matrices must be 16-byte aligned");
  }
  if (params.dropout.first_col % Limits::kColsMultiple != 0) {
    refuse(op, "col0 must be a multiple of 8, got " + std::to_string(params.dropout.first_col));
  }
  if (params.v_dtype != params.dtype && params.v_dtype != FloatType::kFloat32) {
    refuse(op, op == "fp8_grad_input" || op == "fp8_block_grad_input" ? "a_dtype must be dtype or 'float32'"
                                                                      : "b_dtype must be dtype or 'float32'");
  }
  const std::pair tile{params.tile_rows, params.tile_cols};
  if (params.groups > 0) {
    const bool takes = tile == std::pair{128, 128} || (tile == std::pair{128, 256} && !params.untransposed);
    if (params.dtype != FloatType::kBFloat16) refuse(op, "groups are computed in bfloat16");
    if (!takes || (params.splits && !params.untransposed)) {
      refuse(op, "groups take tiles of 128 × 128, and of 128 × 256 for y, whose sums do not split; got " +
                     std::to_string(tile.first) + " × " + std::to_string(tile.second));
    }
    return;
  }
  if (params.in_blocks) {
    if (tile != std::pair{128, 128} && tile != std::pair{128, 256}) {
      refuse(op, "a tile of blocks is 128 × 128 or 128 × 256, got " + std::to_string(tile.first) + " × " +
                     std::to_string(tile.second));
    }
    return;
  }
  const std::pair large = params.splits         ? std::pair{192, 128}
                          : params.untransposed ? std::pair{256, 128}
                                                : std::pair{128, 256};
  const bool takes_low = op == "fp8_linear_lora" && !params.splits;
  if (tile != large && tile != std::pair{128, 128} && !(takes_low && tile == std::pair{64, 128})) {
    refuse(op,
           "a tile is 128 × 128, or 192 × 128 splitting, 128 × 256 otherwise and 256 × 128 of a weight that is not "
           "transposed" +
               std::string(takes_low ? ", or 64 × 128" : "") + "; got " + std::to_string(tile.first) + " × " +
               std::to_string(tile.second));
  }
}

// What both products have.
Fp8GemmParams gemm_params(const Scaled& left, Address right, Address right_scale_inv, const ProductSizes& sizes,
                          const Tiles& tiles) {
  Fp8GemmParams params{};
  params.left = left.data.as<const uint8_t>(), params.right = right.as<const uint8_t>();
  params.left_scale_inv = left.scale_inv.as<const float>();
  params.right_scale_inv = right_scale_inv.as<const float>();
  params.rows = sizes.rows, params.cols = sizes.cols, params.depth = sizes.depth, params.rank = sizes.rank;
  params.u_stride = (sizes.rank + Limits::kColsMultiple - 1) / Limits::kColsMultiple * Limits::kColsMultiple;
  params.splits = tiles.splits, params.tile_rows = tiles.rows, params.tile_cols = tiles.cols;
  params.multiprocessors = tiles.multiprocessors;
  return params;
}

// Adapters that each have as many rows of the product, one after the other.
void put_segments(const std::string& op, Fp8GemmParams& params, int64_t segment_rows) {
  if (segment_rows == 0) return;
  if (segment_rows < 0 || segment_rows % Limits::kGroupRows != 0 || params.rows % segment_rows != 0) {
    refuse(op, "segment_rows must be 0, or a multiple of " + std::to_string(Limits::kGroupRows) +
                   " that divides rows; got " + std::to_string(segment_rows) + " of " + std::to_string(params.rows));
  }
  params.segment_rows = segment_rows, params.groups = params.rows / segment_rows;
}

void put_blocks(const std::string& op, Fp8GemmParams& params, const ProductSizes& sizes) {
  constexpr int kMost = Fp8GemmBlocks::kMost;
  if (sizes.blocks.empty()) return;
  if (sizes.blocks.size() > kMost || params.groups > 0) {
    refuse(op, "B has at most " + std::to_string(kMost) + " blocks on its diagonal, and one without segments; got " +
                   std::to_string(sizes.blocks.size()));
  }
  int64_t cols = 0, rank = 0;
  params.blocks.count = static_cast<int>(sizes.blocks.size());
  for (int i = 0; i < kMost; ++i) {
    if (i < params.blocks.count) {
      const auto [width, own_rank] = sizes.blocks[i];
      if (width < 0 || own_rank < 0 || width > sizes.cols - cols || own_rank > sizes.rank - rank) {
        refuse(op, "the blocks on B's diagonal must have " + std::to_string(sizes.cols) + " columns and " +
                       std::to_string(sizes.rank) + " ranks together, none negative");
      }
      cols += width, rank += own_rank;
    }
    params.blocks.col_end[i] = static_cast<int>(cols), params.blocks.rank_end[i] = static_cast<int>(rank);
  }
  if (cols != sizes.cols || rank != sizes.rank) {
    refuse(op, "the blocks on B's diagonal must have " + std::to_string(sizes.cols) + " columns and " +
                   std::to_string(sizes.rank) + " ranks together; got " + std::to_string(cols) + " and " +
                   std::to_string(rank));
  }
}

Fp8GemmParams linear_params(const LinearOut& out, const Scaled& x, const Weight& weight, const std::optional<Up>& up,
                            const ProductSizes& sizes, const LinearTypes& types, const Tiles& tiles) {
  Fp8GemmParams params = gemm_params(x, weight.data, weight.scale_inv, sizes, tiles);
  const Up factors = up.value_or(Up{});
  params.out = out.y.as<void>(), params.bias = out.bias.as<const void>();
  params.residual = out.residual.as<const void>();
  params.u = factors.s.as<const void>(), params.v = factors.B.as<const void>(), params.factor = factors.scaling;
  params.by_column = types.by_column;
  params.dtype = half_type("dtype", types.dtype), params.v_dtype = float_type("b_dtype", types.b_dtype);
  params.bias_dtype = float_type("bias_dtype", types.bias_dtype);
  return params;
}

void fp8_linear_lora(const LinearOut& out, const Scaled& x, const Weight& weight, const std::optional<Up>& up,
                     const ProductSizes& sizes, const LinearTypes& types, const Tiles& tiles, const Where& where) {
  Fp8GemmParams params = linear_params(out, x, weight, up, sizes, types, tiles);
  put_segments("fp8_linear_lora", params, sizes.segment_rows);
  put_blocks("fp8_linear_lora", params, sizes);
  check("fp8_linear_lora", params);
  const auto launch = params.groups > 0 ? launch_grouped_linear_lora : launch_fp8_linear_lora;
  submit("fp8_linear_lora", params, launch, where.stream, where.device);
}

void fp8_block_linear(const LinearOut& out, const Scaled& x, const Weight& weight, const std::optional<Up>& up,
                      const ProductSizes& sizes, const LinearTypes& types, const Tiles& tiles, const Where& where) {
  Fp8GemmParams params = linear_params(out, x, weight, up, sizes, types, tiles);
  params.in_blocks = true;
  put_blocks("fp8_block_linear", params, sizes);
  check("fp8_block_linear", params);
  submit("fp8_block_linear", params, &launch_fp8_block_linear, where.stream, where.device);
}

Fp8GemmParams grad_params(const GradOut& out, const Scaled& dy, const Weight& weight,
                          const std::optional<Dropout>& dropout, const ProductSizes& sizes, const GradTypes& types,
                          const Tiles& tiles) {
  Fp8GemmParams params = gemm_params(dy, weight.data, weight.scale_inv, sizes, tiles);
  params.out = out.dx.as<void>();
  params.u = out.ds.as<const void>(), params.v = out.A.as<const void>();
  params.dropout = params_of(dropout), params.factor = dropout_survivor_scale(params.dropout.threshold);
  params.dropped = dropout ? dropout->dropped.as<const uint32_t>() : nullptr;
  params.dtype = half_type("dtype", types.dtype), params.v_dtype = float_type("a_dtype", types.a_dtype);
  params.is_e5m2 = is_e5m2("format", types.format);
  return params;
}

void fp8_grad_input(const GradOut& out, const Scaled& dy, const Weight& weight, const std::optional<Dropout>& dropout,
                    const ProductSizes& sizes, const GradTypes& types, const Tiles& tiles, const Where& where) {
  Fp8GemmParams params = grad_params(out, dy, weight, dropout, sizes, types, tiles);
  params.untransposed = true;
  put_segments("fp8_grad_input", params, sizes.segment_rows);
  check("fp8_grad_input", params);
  const auto launch = params.groups > 0 ? launch_grouped_grad_input : launch_fp8_grad_input;
  submit("fp8_grad_input", params, launch, where.stream, where.device);
}

void fp8_block_grad_input(const GradOut& out, const Scaled& dy, const Weight& weight,
                          const std::optional<Dropout>& dropout, const ProductSizes& sizes, const GradTypes& types,
                          const Tiles& tiles, const Where& where) {
  Fp8GemmParams params = grad_params(out, dy, weight, dropout, sizes, types, tiles);
  params.in_blocks = true;
  check("fp8_block_grad_input", params);
  submit("fp8_block_grad_input", params, &launch_fp8_block_grad_input, where.stream, where.device);
}

void put_groups(Fp8GemmParams& params, const GroupedWeight& weight) {
  params.group_of = weight.group_of.as<const int32_t>(), params.groups = weight.groups;
}

void grouped_linear_lora(const Address& y, const Scaled& x, const GroupedWeight& weight, const std::optional<Up>& up,
                         const ProductSizes& sizes, const Dtypes& types, const Tiles& tiles, const Where& where) {
  Fp8GemmParams params = gemm_params(x, weight.data, weight.scale_inv, sizes, tiles);
  const Up factors = up.value_or(Up{});
  put_groups(params, weight);
  params.out = y.as<void>();
  params.u = factors.s.as<const void>(), params.v = factors.B.as<const void>(), params.factor = factors.scaling;
  params.dtype = half_type("dtype", types.first), params.v_dtype = float_type("b_dtype", types.second);
  check("grouped_linear_lora", params);
  submit("grouped_linear_lora", params, &launch_grouped_linear_lora, where.stream, where.device);
}

void grouped_grad_input(const GradOut& out, const Scaled& dy, const GroupedWeight& weight, const ProductSizes& sizes,
                        const GradTypes& types, const Tiles& tiles, const Where& where) {
  Fp8GemmParams params = gemm_params(dy, weight.data, weight.scale_inv, sizes, tiles);
  put_groups(params, weight);
  params.out = out.dx.as<void>(), params.untransposed = true;
  params.u = out.ds.as<const void>(), params.v = out.A.as<const void>(), params.factor = 1.0f;
  params.dtype = half_type("dtype", types.dtype), params.v_dtype = float_type("a_dtype", types.a_dtype);
  params.is_e5m2 = is_e5m2("format", types.format);
  check("grouped_grad_input", params);
  submit("grouped_grad_input", params, &launch_grouped_grad_input, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
  add_limits(m, "fp8_gemm",
             py::dict(py::arg("cols_multiple") = Limits::kColsMultiple,
                      py::arg("untransposed_cols_multiple") = Limits::kUntransposedColsMultiple,
                      py::arg("depth_multiple") = Limits::kDepthMultiple, py::arg("group_rows") = Limits::kGroupRows));
  m.def("fp8_linear_lora", &fp8_linear_lora, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("up"),
        py::arg("sizes"), py::arg("types"), py::arg("tiles"), py::arg("where"), "rows of s and B are multiples of 8");
  m.def("fp8_block_linear", &fp8_block_linear, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("up"),
        py::arg("sizes"), py::arg("types"), py::arg("tiles"), py::arg("where"),
        "with scales of 1 × 128 of x and 128 × 128 of the weight; rows of s and B are multiples of 8");
  m.def("fp8_grad_input", &fp8_grad_input, py::arg("out"), py::arg("dy"), py::arg("weight"), py::arg("dropout"),
        py::arg("sizes"), py::arg("types"), py::arg("tiles"), py::arg("where"),
        "the weight is multiplied as it lies; rows of ds are multiples of 8");
  m.def("fp8_block_grad_input", &fp8_block_grad_input, py::arg("out"), py::arg("dy"), py::arg("weight"),
        py::arg("dropout"), py::arg("sizes"), py::arg("types"), py::arg("tiles"), py::arg("where"),
        "the weight is transposed, its scales are as it lies, of 128 × 128; rows of ds are multiples of 8");
  m.def("grouped_linear_lora", &grouped_linear_lora, py::arg("y"), py::arg("x"), py::arg("weight"), py::arg("up"),
        py::arg("sizes"), py::arg("types"), py::arg("tiles"), py::arg("where"), "rows of s and B are multiples of 8");
  m.def("grouped_grad_input", &grouped_grad_input, py::arg("out"), py::arg("dy"), py::arg("weight"), py::arg("sizes"),
        py::arg("types"), py::arg("tiles"), py::arg("where"), "rows of ds are multiples of 8");
}

}  // namespace lorakernels::fp8_gemm
