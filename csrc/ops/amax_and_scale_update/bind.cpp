// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include "host/launch_list.h"
#include "ops/amax_and_scale_update/params.h"
#include "register.h"

namespace lorakernels {
namespace {

float current_of(const AmaxAndScaleUpdateParams& params, int direction, int64_t column) {
  return params.current != nullptr ? params.current[direction * params.n + column] : params.state[direction][column];
}

bool gate_is_open(const AmaxAndScaleUpdateParams& params) {
  if (!params.gated) return true;
  for (int64_t column = 0; column < params.n; ++column) {
    if (opens_gate(current_of(params, 1, column))) return true;
  }
  return false;
}

void update_column(const AmaxAndScaleUpdateParams& params, int direction, int64_t column) {
  const float current = current_of(params, direction, column);
  if (current == 0.0f) return;
  float* const history = params.state[direction] + column;
  const int64_t last = params.history_len - 1;
  float amax = 0.0f;
  for (int64_t row = 1; row <= last; ++row) {
    const float entry = history[row * params.n];
    amax = max_of_finite(amax, entry);
    history[(row - 1) * params.n] = entry;
  }
  amax = params.most_recent ? current : max_of_finite(amax, current);
  history[last * params.n] = current;
  history[0] = 0.0f;
  float& scale = history[params.history_len * params.n];
  scale = updated_scale(scale, current, amax, params.scaled_fp8_max[direction]);
}

void refuse_overlap(const char* a_name, uintptr_t a, uintptr_t a_count, const char* b_name, uintptr_t b,
                    uintptr_t b_count) {
  if (a < b + b_count * sizeof(float) && b < a + a_count * sizeof(float)) {
    throw std::invalid_argument(std::string("amax_and_scale_update: ") + a_name + " must not overlap " + b_name +
                                ", which this call rolls");
  }
}

AmaxAndScaleUpdateParams make_params(uintptr_t forward, uintptr_t backward, uintptr_t current, int64_t n,
                                     int64_t history_len, float fp8_max_forward, float fp8_max_backward, int margin,
                                     const std::string& algo, bool gated) {
  check_sizes("amax_and_scale_update", {{"n", n}, {"history_len - 1", history_len - 1}});
  if (algo != "max" && algo != "most_recent") {
    throw std::invalid_argument("amax_compute_algo must be 'max' or 'most_recent', got '" + algo + "'");
  }
  const auto count = static_cast<uintptr_t>((history_len + 1) * n);
  refuse_overlap("forward", forward, count, "backward", backward, count);
  if (current != 0) {
    refuse_overlap("current", current, static_cast<uintptr_t>(2 * n), "forward", forward, count);
    refuse_overlap("current", current, static_cast<uintptr_t>(2 * n), "backward", backward, count);
  }
  return {{reinterpret_cast<float*>(forward), reinterpret_cast<float*>(backward)},
          reinterpret_cast<const float*>(current),
          n,
          history_len,
          {std::ldexp(fp8_max_forward, -margin), std::ldexp(fp8_max_backward, -margin)},
          algo == "most_recent",
          gated};
}

}  // namespace

void amax_and_scale_update_host(const AmaxAndScaleUpdateParams& params) {
  if (!gate_is_open(params)) return;
  for (int direction = 0; direction < 2; ++direction) {
    for (int64_t column = 0; column < params.n; ++column) update_column(params, direction, column);
  }
}

void register_amax_and_scale_update(py::module_& m) {
  m.def(
      "amax_and_scale_update_host",
      [](uintptr_t forward, uintptr_t backward, uintptr_t current, int64_t n, int64_t history_len,
         float fp8_max_forward, float fp8_max_backward, int margin, const std::string& algo, bool gated) {
        amax_and_scale_update_host(make_params(forward, backward, current, n, history_len, fp8_max_forward,
                                               fp8_max_backward, margin, algo, gated));
      },
      py::arg("forward"), py::arg("backward"), py::arg("current"), py::arg("n"), py::arg("history_len"),
      py::arg("fp8_max_forward"), py::arg("fp8_max_backward"), py::arg("margin"), py::arg("amax_compute_algo"),
      py::arg("gated") = false, "In place on host memory: forward and backward fp32 [history_len + 1, n]");
  m.def(
      "amax_and_scale_update",
      [](uintptr_t forward, uintptr_t backward, uintptr_t current, int64_t n, int64_t history_len,
         float fp8_max_forward, float fp8_max_backward, int margin, const std::string& algo, bool gated,
         uintptr_t stream, int device) {
        const auto params = make_params(forward, backward, current, n, history_len, fp8_max_forward, fp8_max_backward,
                                        margin, algo, gated);
        if (gated && current == 0) {
          throw std::invalid_argument("amax_and_scale_update: gated needs current on a device, got none");
        }
        submit("amax_and_scale_update", params, &launch_amax_and_scale_update, stream, device);
      },
      py::arg("forward"), py::arg("backward"), py::arg("current"), py::arg("n"), py::arg("history_len"),
      py::arg("fp8_max_forward"), py::arg("fp8_max_backward"), py::arg("margin"), py::arg("amax_compute_algo"),
      py::arg("gated") = false, py::arg("stream") = 0, py::arg("device") = -1,
      "In place on device memory, on the given stream and device (-1: the current one)");
}

}  // namespace lorakernels
