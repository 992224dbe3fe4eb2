// SPDX-License-Identifier: Apache-2.0
// Delayed scaling for every tensor of a model, both directions, in one launch. It is Transformer Engine's recipe, but
// ignores entries of the history that are not finite. One inf or NaN therefore does not freeze the scale for a whole
// history.
//
// A direction's state is fp32 [history_len + 1, n], row-major: rows 0 .. history_len-1 are the amax history h, the last
// row is the scale. `current`, if given, has amaxes that were reduced over ranks: n of forward, then n of backward.
// Per column, cur is its entry of `current`, or else h[0]:
//   cur == 0          nothing changes (the tensor was not used since the last update)
//   otherwise         amax = cur (most recent), or the largest of cur and the finite h[1..] (max);
//                     h[i] <- h[i+1], h[last] <- cur, h[0] <- 0;
//                     scale <- fp8_max 2^-margin / amax, overflow -> FLT_MAX; kept if cur is inf or NaN, or amax <= 0
// gated: nothing changes unless backward's cur is > 0 or NaN in some column.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/platform.h"

namespace lorakernels {

struct AmaxAndScaleUpdateParams {
  float* state[2];          // forward, backward: [history_len + 1, n], row stride n
  const float* current;     // [2 n] or null; must not overlap the states
  int64_t n;                // columns: one per tensor
  int64_t history_len;      // rows of history, >= 1
  float scaled_fp8_max[2];  // fp8_max * 2^-margin
  bool most_recent;         // amax_compute_algo: most_recent or max
  bool gated;
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(AmaxAndScaleUpdateParams& params, const Visit& visit) {
  visit(params.state[0], params.state[1], params.current);
}

LORAKERNELS_HD bool is_finite(float x) { return x - x == 0.0f; }

LORAKERNELS_HD bool opens_gate(float amax) { return !(amax <= 0.0f); }

LORAKERNELS_HD float max_of_finite(float amax, float entry) { return is_finite(entry) && entry > amax ? entry : amax; }

LORAKERNELS_HD float updated_scale(float scale, float current, float amax, float scaled_fp8_max) {
  if (!is_finite(current) || !(amax > 0.0f)) return scale;
  const float next = scaled_fp8_max / amax;
  return is_finite(next) ? next : FLT_MAX;
}

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t. `gated` needs `current`: without it one
// block would overwrite row 0 while another still reads it.
void launch_amax_and_scale_update(const AmaxAndScaleUpdateParams& params, void* stream, int device);

}  // namespace lorakernels
