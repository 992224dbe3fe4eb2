// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "host/launch_list.h"
#include "ops/transpose_fp8/params.h"
#include "register.h"

namespace lorakernels {
namespace {

void transpose_fp8(uintptr_t out, uintptr_t in, int64_t rows, int64_t cols, uintptr_t stream, int device) {
  check_sizes("transpose_fp8", {{"rows", rows}, {"cols", cols}});
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024, kMostTiles = int64_t{1} << 30;
  if (rows > kMost || cols > kMost || ((rows + 127) / 128) * ((cols + 127) / 128) > kMostTiles) {
    throw std::invalid_argument("transpose_fp8: rows and cols must be at most " + std::to_string(kMost) +
                                ", and their 128 × 128 tiles " + std::to_string(kMostTiles) + "; got rows " +
                                std::to_string(rows) + ", cols " + std::to_string(cols));
  }
  const TransposeFp8Params params{reinterpret_cast<uint8_t*>(out), reinterpret_cast<const uint8_t*>(in), rows, cols};
  submit("transpose_fp8", params, &launch_transpose_fp8, stream, device);
}

}  // namespace

void register_transpose_fp8(py::module_& m) {
  m.def("transpose_fp8", &transpose_fp8, py::arg("out"), py::arg("in_"), py::arg("rows"), py::arg("cols"),
        py::arg("stream"), py::arg("device"),
        "out [cols, rows] = in [rows, cols] transposed, bytes at device addresses");
}

}  // namespace lorakernels
