// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>

#include "host/launch_list.h"
#include "ops/fp8_gemm/params.h"
#include "register.h"

namespace lorakernels {
namespace {

using Limits = Fp8GemmLimits;

[[noreturn]] void refuse(const std::string& op, const std::string& what) {
  throw std::invalid_argument(op + ": " + what);
}

void check(const std::string& op, const Fp8GemmParams& params) {
  const auto [rows, cols, depth] = std::tuple{params.rows, params.cols, params.depth};
  check_sizes(op.c_str(), {{"rows", rows},
                           {"cols", cols},
                           {"depth", depth},
                           {"rank", params.rank},
                           {"stride", params.u_stride},
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
  if (params.untransposed && (cols % Limits::kUntransposedColsMultiple != 0 || !params.splits)) {
    refuse(op, "a weight that is not transposed takes splits and cols a multiple of " +
                   std::to_string(Limits::kUntransposedColsMultiple) + ", got cols " + std::to_string(cols) +
                   (params.splits ? "" : " without splits"));
  }
  if (params.u_stride % Limits::kColsMultiple != 0 || params.u_stride < params.rank) {
    refuse(op, "stride must be a multiple of 8 and at least rank " + std::to_string(params.rank) + ", got " +
                   std::to_string(params.u_stride));
  }
  for (const void* pointer : {static_cast<const void*>(params.out), static_cast<const void*>(params.left),
                              static_cast<const void*>(params.right), params.u, params.v, params.residual,
                              static_cast<const void*>(params.dropped)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) refuse(op, "matrices must be 16-byte aligned");
  }
  if (params.dropout.first_col % Limits::kColsMultiple != 0) {
    refuse(op, "first_col must be a multiple of 8, got " + std::to_string(params.dropout.first_col));
  }
  if (params.v_dtype != params.dtype && params.v_dtype != FloatType::kFloat32) {
    refuse(op, op == "fp8_grad_input" ? "a_dtype must be dtype or 'float32'" : "b_dtype must be dtype or 'float32'");
  }
  const std::pair tile{params.tile_rows, params.tile_cols};
  const bool large = !params.splits
                         ? tile == std::pair{128, 256}
                         : tile == std::pair{192, 128} || (tile == std::pair{256, 128} && !params.untransposed);
  if (!large && tile != std::pair{128, 128}) {
    refuse(op,
           "a tile is 128 × 128, 192 × 128 or 256 × 128 splitting (not 256 × 128 of a weight that is not "
           "transposed), 128 × 256 otherwise; got " +
               std::to_string(tile.first) + " × " + std::to_string(tile.second));
  }
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void fp8_linear_lora(uintptr_t y, uintptr_t x8, uintptr_t weight, uintptr_t x_scale_inv, uintptr_t weight_scale_inv,
                     bool by_column, uintptr_t s, uintptr_t B, uintptr_t bias, uintptr_t residual, int64_t rows,
                     int64_t cols, int64_t depth, int64_t rank, int64_t stride, float scaling, const std::string& dtype,
                     const std::string& b_dtype, const std::string& bias_dtype, bool splits,
                     const std::pair<int, int>& tile, int64_t multiprocessors, uintptr_t stream, int device) {
  Fp8GemmParams params{};
  params.out = pointer<void>(y);
  params.left = pointer<const uint8_t>(x8), params.right = pointer<const uint8_t>(weight);
  params.left_scale_inv = pointer<const float>(x_scale_inv);
  params.right_scale_inv = pointer<const float>(weight_scale_inv), params.by_column = by_column;
  params.u = pointer<const void>(s), params.v = pointer<const void>(B);
  params.bias = pointer<const void>(bias), params.residual = pointer<const void>(residual);
  params.rows = rows, params.cols = cols, params.depth = depth, params.rank = rank, params.u_stride = stride;
  params.factor = scaling;
  params.dtype = half_type("dtype", dtype), params.v_dtype = float_type("b_dtype", b_dtype);
  params.bias_dtype = float_type("bias_dtype", bias_dtype);
  params.splits = splits, params.tile_rows = tile.first, params.tile_cols = tile.second;
  params.multiprocessors = multiprocessors;
  check("fp8_linear_lora", params);
  submit("fp8_linear_lora", params, &launch_fp8_linear_lora, stream, device);
}

void fp8_grad_input(uintptr_t dx, uintptr_t dy8, uintptr_t weight, bool transposed, uintptr_t dy_scale_inv,
                    uintptr_t weight_scale_inv, uintptr_t ds, uintptr_t A, int64_t rows, int64_t cols, int64_t depth,
                    int64_t rank, int64_t stride, float factor, uintptr_t slot, uint32_t site, uint32_t threshold,
                    uint32_t first_row, uint32_t first_col, uintptr_t dropped, const std::string& dtype,
                    const std::string& a_dtype, const std::string& format, bool splits, const std::pair<int, int>& tile,
                    int64_t multiprocessors, uintptr_t stream, int device) {
  Fp8GemmParams params{};
  params.out = pointer<void>(dx);
  params.left = pointer<const uint8_t>(dy8), params.right = pointer<const uint8_t>(weight);
  params.untransposed = !transposed;
  params.left_scale_inv = pointer<const float>(dy_scale_inv);
  params.right_scale_inv = pointer<const float>(weight_scale_inv);
  params.u = pointer<const void>(ds), params.v = pointer<const void>(A);
  params.rows = rows, params.cols = cols, params.depth = depth, params.rank = rank, params.u_stride = stride;
  params.factor = factor;
  params.dropout = dropout_params(slot, site, threshold, first_row, first_col);
  params.dropped = pointer<const uint32_t>(dropped);
  params.dtype = half_type("dtype", dtype), params.v_dtype = float_type("a_dtype", a_dtype);
  params.is_e5m2 = is_e5m2("format", format);
  params.splits = splits, params.tile_rows = tile.first, params.tile_cols = tile.second;
  params.multiprocessors = multiprocessors;
  check("fp8_grad_input", params);
  const auto launch = transposed ? launch_fp8_grad_input : launch_fp8_grad_input_untransposed;
  submit("fp8_grad_input", params, launch, stream, device);
}

}  // namespace

void register_fp8_gemm(py::module_& m) {
  add_limits(m, "fp8_gemm",
             py::dict(py::arg("cols_multiple") = Limits::kColsMultiple,
                      py::arg("untransposed_cols_multiple") = Limits::kUntransposedColsMultiple,
                      py::arg("depth_multiple") = Limits::kDepthMultiple));
  const char* const addresses = "Device addresses, 0 for a tensor that is not there";
  m.def("fp8_linear_lora", &fp8_linear_lora, py::arg("y"), py::arg("x8"), py::arg("weight"), py::arg("x_scale_inv"),
        py::arg("weight_scale_inv"), py::arg("by_column"), py::arg("s"), py::arg("B"), py::arg("bias"),
        py::arg("residual"), py::arg("rows"), py::arg("cols"), py::arg("depth"), py::arg("rank"), py::arg("stride"),
        py::arg("scaling"), py::arg("dtype"), py::arg("b_dtype"), py::arg("bias_dtype"), py::arg("splits"),
        py::arg("tile"), py::arg("multiprocessors"), py::arg("stream"), py::arg("device"), addresses);
  m.def("fp8_grad_input", &fp8_grad_input, py::arg("dx"), py::arg("dy8"), py::arg("weight"), py::arg("transposed"),
        py::arg("dy_scale_inv"), py::arg("weight_scale_inv"), py::arg("ds"), py::arg("A"), py::arg("rows"),
        py::arg("cols"), py::arg("depth"), py::arg("rank"), py::arg("stride"), py::arg("factor"), py::arg("slot"),
        py::arg("site"), py::arg("threshold"), py::arg("first_row"), py::arg("first_col"), py::arg("dropped"),
        py::arg("dtype"), py::arg("a_dtype"), py::arg("format"), py::arg("splits"), py::arg("tile"),
        py::arg("multiprocessors"), py::arg("stream"), py::arg("device"), addresses);
}

}  // namespace lorakernels
