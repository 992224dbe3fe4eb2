// SPDX-License-Identifier: Apache-2.0
#include "fp8_grad_input.h"

#include <string>

#include "register.h"

namespace lorakernels {
namespace {

void check_shape(int64_t rows, int64_t cols, int64_t depth, int64_t rank, int64_t ds_stride) {
  check_sizes("fp8_grad_input",
              {{"rows", rows}, {"cols", cols}, {"depth", depth}, {"rank", rank}, {"ds_stride", ds_stride}});
  constexpr int64_t kMost = (int64_t{1} << 31) - 256;
  const auto tiles = [](int64_t size) { return (size + 127) / 128; };
  if (cols % 8 != 0 || depth % 16 != 0 || depth == 0 || rows > kMost || cols > kMost || depth > kMost ||
      tiles(rows) * tiles(cols) > kMost) {
    throw std::invalid_argument(
        "fp8_grad_input: cols must be a multiple of 8, depth a positive one of 16, each and the tiles of 128 × 128 at "
        "most " +
        std::to_string(kMost) + "; got rows " + std::to_string(rows) + ", cols " + std::to_string(cols) + ", depth " +
        std::to_string(depth));
  }
  if (ds_stride % 8 != 0 || ds_stride < rank) {
    throw std::invalid_argument("fp8_grad_input: ds_stride must be a multiple of 8 and at least rank " +
                                std::to_string(rank) + ", got " + std::to_string(ds_stride));
  }
}

void fp8_grad_input(uintptr_t dx, uintptr_t dy8, uintptr_t weight_t, uintptr_t dy_scale_inv, uintptr_t weight_scale_inv,
                    uintptr_t ds, uintptr_t A, int64_t rows, int64_t cols, int64_t depth, int64_t rank,
                    int64_t ds_stride, float factor, uintptr_t slot, uint32_t site, uint32_t threshold,
                    uint32_t first_row, uint32_t first_col, uintptr_t dropped, const std::string& dtype,
                    const std::string& a_dtype, const std::string& format, bool splits, bool large_tiles,
                    int64_t multiprocessors, uintptr_t stream, int device) {
  check_shape(rows, cols, depth, rank, ds_stride);
  if ((dx | dy8 | weight_t | ds | A | dropped) % 16 != 0) {
    throw std::invalid_argument("fp8_grad_input: dx, dy8, weight_t, ds, A and dropped must be 16-byte aligned");
  }
  if (first_col % 8 != 0) {
    throw std::invalid_argument("fp8_grad_input: first_col must be a multiple of 8, got " + std::to_string(first_col));
  }
  const FloatType type = half_type("dtype", dtype), a_type = float_type("a_dtype", a_dtype);
  if (a_type != type && a_type != FloatType::kFloat32) {
    throw std::invalid_argument("fp8_grad_input: a_dtype must be dtype " + dtype + " or 'float32', got '" + a_dtype +
                                "'");
  }
  const Fp8GradInputParams params{reinterpret_cast<void*>(dx),
                                  reinterpret_cast<const uint8_t*>(dy8),
                                  reinterpret_cast<const uint8_t*>(weight_t),
                                  reinterpret_cast<const float*>(dy_scale_inv),
                                  reinterpret_cast<const float*>(weight_scale_inv),
                                  reinterpret_cast<const void*>(ds),
                                  reinterpret_cast<const void*>(A),
                                  rows,
                                  cols,
                                  depth,
                                  rank,
                                  ds_stride,
                                  factor,
                                  dropout_params(slot, site, threshold, first_row, first_col),
                                  reinterpret_cast<const uint32_t*>(dropped),
                                  type,
                                  a_type == FloatType::kFloat32,
                                  is_e5m2("format", format),
                                  splits,
                                  large_tiles,
                                  multiprocessors};
  launch_fp8_grad_input(params, reinterpret_cast<void*>(stream), device);
}

}  // namespace

void register_fp8_grad_input(py::module_& m) {
  m.def("fp8_grad_input", &fp8_grad_input, py::arg("dx"), py::arg("dy8"), py::arg("weight_t"), py::arg("dy_scale_inv"),
        py::arg("weight_scale_inv"), py::arg("ds"), py::arg("A"), py::arg("rows"), py::arg("cols"), py::arg("depth"),
        py::arg("rank"), py::arg("ds_stride"), py::arg("factor"), py::arg("slot"), py::arg("site"),
        py::arg("threshold"), py::arg("first_row"), py::arg("first_col"), py::arg("dropped"), py::arg("dtype"),
        py::arg("a_dtype"), py::arg("format"), py::arg("splits"), py::arg("large_tiles"), py::arg("multiprocessors"),
        py::arg("stream"), py::arg("device"), "Device addresses, 0 for a tensor that is not there");
}

}  // namespace lorakernels
