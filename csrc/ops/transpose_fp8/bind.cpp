// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/transpose_fp8/params.h"

namespace lorakernels::transpose_fp8 {
namespace {

void transpose_fp8(Address out, Address in, const Sizes& sizes, const Where& where) {
  const auto [rows, cols] = sizes;
  check_sizes("transpose_fp8", {{"rows", rows}, {"cols", cols}});
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024, kMostTiles = int64_t{1} << 30;
  if (rows > kMost || cols > kMost || ((rows + 127) / 128) * ((cols + 127) / 128) > kMostTiles) {
    throw std::invalid_argument("transpose_fp8: rows and cols must be at most " + std::to_string(kMost) +
                                ", and their 128 × 128 tiles " + std::to_string(kMostTiles) + "; got rows " +
                                std::to_string(rows) + ", cols " + std::to_string(cols));
  }
  const TransposeFp8Params params{out.as<uint8_t>(), in.as<const uint8_t>(), rows, cols};
  submit("transpose_fp8", params, &launch_transpose_fp8, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
  m.def("transpose_fp8", &transpose_fp8, py::arg("out"), py::arg("in_"), py::arg("sizes"), py::arg("where"),
        "out [cols, rows] = in [rows, cols] transposed, bytes on the device");
}

}  // namespace lorakernels::transpose_fp8
