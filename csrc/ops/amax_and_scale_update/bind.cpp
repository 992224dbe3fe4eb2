// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>
#include <tuple>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/amax_and_scale_update/params.h"

namespace lorakernels::amax_and_scale_update {
namespace {

// forward and backward fp32 [history_len + 1, n], current fp32 [2 n] or none.
struct States {
  Address forward, backward, current;
  int64_t n, history_len;

  static constexpr auto members() {
    return in_order(&States::forward, &States::backward, &States::current, &States::n, &States::history_len);
  }
};

struct Recipe {
  float fp8_max_forward, fp8_max_backward;
  int margin;
  std::string algo;

  static constexpr auto members() {
    return in_order(&Recipe::fp8_max_forward, &Recipe::fp8_max_backward, &Recipe::margin, &Recipe::algo);
  }
};

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

AmaxAndScaleUpdateParams make_params(const States& states, const Recipe& recipe, bool gated) {
  const auto [forward, backward, current] =
      std::tuple{states.forward.value, states.backward.value, states.current.value};
  check_sizes("amax_and_scale_update", {{"n", states.n}, {"history_len - 1", states.history_len - 1}});
  if (recipe.algo != "max" && recipe.algo != "most_recent") {
    throw std::invalid_argument("amax_compute_algo must be 'max' or 'most_recent', got '" + recipe.algo + "'");
  }
  const auto count = static_cast<uintptr_t>((states.history_len + 1) * states.n);
  const auto row = static_cast<uintptr_t>(2 * states.n);
  refuse_overlap("forward", forward, count, "backward", backward, count);
  if (current != 0) {
    refuse_overlap("current", current, row, "forward", forward, count);
    refuse_overlap("current", current, row, "backward", backward, count);
  }
  return {{states.forward.as<float>(), states.backward.as<float>()},
          states.current.as<const float>(),
          states.n,
          states.history_len,
          {std::ldexp(recipe.fp8_max_forward, -recipe.margin), std::ldexp(recipe.fp8_max_backward, -recipe.margin)},
          recipe.algo == "most_recent",
          gated};
}

void amax_and_scale_update_host(const AmaxAndScaleUpdateParams& params) {
  if (!gate_is_open(params)) return;
  for (int direction = 0; direction < 2; ++direction) {
    for (int64_t column = 0; column < params.n; ++column) update_column(params, direction, column);
  }
}

}  // namespace

void register_in(py::module_& m) {
  m.def(
      "amax_and_scale_update_host",
      [](const States& states, const Recipe& recipe, bool gated) {
        amax_and_scale_update_host(make_params(states, recipe, gated));
      },
      py::arg("states"), py::arg("recipe"), py::arg("gated"), "In place in host memory");
  m.def(
      "amax_and_scale_update",
      [](const States& states, const Recipe& recipe, bool gated, const Where& where) {
        const auto params = make_params(states, recipe, gated);
        if (gated && params.current == nullptr) {
          throw std::invalid_argument("amax_and_scale_update: gated needs current on a device, got none");
        }
        submit("amax_and_scale_update", params, &launch_amax_and_scale_update, where.stream, where.device);
      },
      py::arg("states"), py::arg("recipe"), py::arg("gated"), py::arg("where"), "In place in device memory");
}

}  // namespace lorakernels::amax_and_scale_update
