// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/dropout_mask/params.h"

namespace lorakernels::dropout_mask {
namespace {

void dropout_mask(Address out, const Sizes& sizes, const Dropout& dropout, const Where& where) {
  const auto [rows, cols] = sizes;
  check_sizes("dropout_mask", {{"rows", rows}, {"cols", cols}});
  const DropoutParams draw = params_of(dropout);
  const DropoutMaskParams params{out.as<uint8_t>(), draw.slot,      rows,      cols,
                                 draw.site,         draw.threshold, draw.rows, draw.first_col};
  submit("dropout_mask", params, &launch_dropout_mask, where.stream, where.device);
}

void dropped_bits(Address dropped, const Sizes& sizes, const Dropout& dropout, const Where& where) {
  const auto [rows, cols] = sizes;
  check_sizes("dropped_bits", {{"rows", rows}, {"cols", cols}});
  constexpr int64_t kMost = int64_t{1} << 31;
  const DropoutParams draw = params_of(dropout);
  if (draw.threshold == 0 || draw.first_col % 8 != 0 || rows >= kMost || cols >= kMost) {
    throw std::invalid_argument(
        "dropped_bits: p must drop something, col0 be a multiple of 8, rows and cols below 2^31; got p " +
        std::to_string(dropout.p) + ", col0 " + std::to_string(draw.first_col) + ", rows " + std::to_string(rows) +
        ", cols " + std::to_string(cols));
  }
  const DroppedBitsParams params{dropped.as<uint32_t>(), rows, cols, draw};
  submit("dropped_bits", params, &launch_dropped_bits, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
  m.def("dropout_mask", &dropout_mask, py::arg("out"), py::arg("sizes"), py::arg("dropout"), py::arg("where"),
        "Writes the row-major uint8 keep mask [rows, cols] in device memory: out is 8-byte aligned");
  m.def("dropped_bits", &dropped_bits, py::arg("dropped"), py::arg("sizes"), py::arg("dropout"), py::arg("where"),
        "Writes a bit an element, set where it is dropped, as csrc/device/dropout.h lays them out");
}

}  // namespace lorakernels::dropout_mask
