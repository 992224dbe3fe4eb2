// SPDX-License-Identifier: Apache-2.0
#include "amax.h"

#include "register.h"

namespace lorakernels {

void register_amax(py::module_& m) {
  m.attr("AMAX_PARTIALS") = ScaleSource::kPartials;
  m.def(
      "amax_if_unset",
      [](uintptr_t kept, uintptr_t partials, uintptr_t x, int64_t count, const std::string& dtype, uintptr_t stream,
         int device) {
        check_sizes("amax_if_unset", {{"count", count}});
        if (count % 8 != 0 || x % 16 != 0) {
          throw std::invalid_argument("amax_if_unset: count must be a multiple of 8 and x 16-byte aligned, got count " +
                                      std::to_string(count) + " and x % 16 = " + std::to_string(x % 16));
        }
        const FloatType type = float_type("dtype", dtype);
        if (type == FloatType::kFloat32) {
          throw std::invalid_argument("dtype must be 'bfloat16' or 'float16', got 'float32'");
        }
        const ScaleSource source{reinterpret_cast<const float*>(kept), reinterpret_cast<uint32_t*>(partials), 1.0f};
        launch_amax_if_unset(source, reinterpret_cast<const void*>(x), count, type, reinterpret_cast<void*>(stream),
                             device);
      },
      py::arg("kept"), py::arg("partials"), py::arg("x"), py::arg("count"), py::arg("dtype"), py::arg("stream") = 0,
      py::arg("device") = -1,
      "partials int32 [AMAX_PARTIALS] <- bits of fp32 amaxes of parts of x, unless *kept > 0 (kept 0: always)");
}

}  // namespace lorakernels
