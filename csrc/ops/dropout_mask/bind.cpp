// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "host/launch_list.h"
#include "ops/dropout_mask/params.h"
#include "register.h"

namespace lorakernels {

void register_dropout_mask(py::module_& m) {
  m.def(
      "dropout_mask",
      [](uintptr_t out, int64_t rows, int64_t cols, uintptr_t slot, uint32_t site, uint32_t threshold, uintptr_t stream,
         int device, uint32_t first_row, uint32_t first_col) {
        check_threshold(threshold);
        check_sizes("dropout_mask", {{"rows", rows}, {"cols", cols}});
        const DropoutMaskParams params{reinterpret_cast<uint8_t*>(out),
                                       reinterpret_cast<const int64_t*>(slot),
                                       rows,
                                       cols,
                                       site,
                                       threshold,
                                       first_row,
                                       first_col};
        submit("dropout_mask", params, &launch_dropout_mask, stream, device);
      },
      py::arg("out"), py::arg("rows"), py::arg("cols"), py::arg("slot"), py::arg("site"), py::arg("threshold"),
      py::arg("stream") = 0, py::arg("device") = -1, py::arg("first_row") = 0, py::arg("first_col") = 0,
      "Writes the row-major uint8 keep mask [rows, cols] in device memory: out (8-byte aligned) and slot int64 [2] are "
      "device addresses");
  m.def(
      "dropped_bits",
      [](uintptr_t dropped, int64_t rows, int64_t cols, uintptr_t slot, uint32_t site, uint32_t threshold,
         uint32_t first_row, uint32_t first_col, uintptr_t stream, int device) {
        check_sizes("dropped_bits", {{"rows", rows}, {"cols", cols}});
        constexpr int64_t kMost = int64_t{1} << 31;
        if (threshold == 0 || first_col % 8 != 0 || rows >= kMost || cols >= kMost) {
          throw std::invalid_argument(
              "dropped_bits: threshold must be above 0, first_col a multiple of 8, rows and cols below 2^31; got "
              "threshold " +
              std::to_string(threshold) + ", first_col " + std::to_string(first_col) + ", rows " +
              std::to_string(rows) + ", cols " + std::to_string(cols));
        }
        const DroppedBitsParams params{reinterpret_cast<uint32_t*>(dropped), rows, cols,
                                       dropout_params(slot, site, threshold, first_row, first_col)};
        submit("dropped_bits", params, &launch_dropped_bits, stream, device);
      },
      py::arg("dropped"), py::arg("rows"), py::arg("cols"), py::arg("slot"), py::arg("site"), py::arg("threshold"),
      py::arg("first_row"), py::arg("first_col"), py::arg("stream"), py::arg("device"),
      "Writes a bit an element, set where it is dropped, as csrc/device/dropout.h lays them out, to a device address");
}

}  // namespace lorakernels
