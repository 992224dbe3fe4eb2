// SPDX-License-Identifier: Apache-2.0
#include "amax_and_scale_update.h"

#include <cmath>
#include <string>

#include "register.h"

namespace lorakernels {
namespace {

bool gate_is_open(const float* gate, int64_t n_gate) {
  if (gate == nullptr) return true;
  for (int64_t i = 0; i < n_gate; ++i) {
    if (gate[i] > 0.0f) return true;
  }
  return false;
}

void update_column(float* history, const AmaxAndScaleUpdateParams& params) {
  const int64_t last = params.history_len - 1;
  const float current = history[0];
  if (current == 0.0f) return;
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
  scale = updated_scale(scale, current, amax, params.scaled_fp8_max);
}

AmaxAndScaleUpdateParams make_params(uintptr_t state, int64_t n, int64_t history_len, float fp8_max, int margin,
                                     const std::string& algo, uintptr_t gate, int64_t n_gate) {
  check_sizes("amax_and_scale_update", {{"n", n}, {"n_gate", n_gate}, {"history_len - 1", history_len - 1}});
  if (algo != "max" && algo != "most_recent") {
    throw std::invalid_argument("amax_compute_algo must be 'max' or 'most_recent', got '" + algo + "'");
  }
  const uintptr_t state_end = state + static_cast<uintptr_t>((history_len + 1) * n) * sizeof(float);
  const uintptr_t gate_end = gate + static_cast<uintptr_t>(n_gate) * sizeof(float);
  if (gate != 0 && gate < state_end && state < gate_end) {
    throw std::invalid_argument("amax_and_scale_update: gate must not overlap state, which this call rolls");
  }
  return {reinterpret_cast<float*>(state),
          reinterpret_cast<const float*>(gate),
          n,
          n_gate,
          history_len,
          std::ldexp(fp8_max, -margin),
          algo == "most_recent"};
}

}  // namespace

void amax_and_scale_update_host(const AmaxAndScaleUpdateParams& params) {
  if (!gate_is_open(params.gate, params.n_gate)) return;
  for (int64_t column = 0; column < params.n; ++column) update_column(params.state + column, params);
}

void register_amax_and_scale_update(py::module_& m) {
  m.def(
      "amax_and_scale_update_host",
      [](uintptr_t state, int64_t n, int64_t history_len, float fp8_max, int margin, const std::string& algo,
         uintptr_t gate, int64_t n_gate) {
        amax_and_scale_update_host(make_params(state, n, history_len, fp8_max, margin, algo, gate, n_gate));
      },
      py::arg("state"), py::arg("n"), py::arg("history_len"), py::arg("fp8_max"), py::arg("margin"),
      py::arg("amax_compute_algo"), py::arg("gate") = 0, py::arg("n_gate") = 0,
      "In place on host memory: state fp32 [history_len + 1, n]");
  m.def(
      "amax_and_scale_update",
      [](uintptr_t state, int64_t n, int64_t history_len, float fp8_max, int margin, const std::string& algo,
         uintptr_t gate, int64_t n_gate, uintptr_t stream, int device) {
        launch_amax_and_scale_update(make_params(state, n, history_len, fp8_max, margin, algo, gate, n_gate),
                                     reinterpret_cast<void*>(stream), device);
      },
      py::arg("state"), py::arg("n"), py::arg("history_len"), py::arg("fp8_max"), py::arg("margin"),
      py::arg("amax_compute_algo"), py::arg("gate") = 0, py::arg("n_gate") = 0, py::arg("stream") = 0,
      py::arg("device") = -1, "In place on device memory, on the given stream and device (-1: the current one)");
}

}  // namespace lorakernels
