// SPDX-License-Identifier: Apache-2.0
// For .cu files only: an amax of 16-bit elements, and the scale that the quantizing kernel uses.
#pragma once

#include "ops/amax/params.h"

namespace lorakernels {

// The larger magnitudes of `most` and of two 16-bit elements, half by half.
__device__ __forceinline__ uint32_t max_magnitude(uint32_t most, uint32_t word) {
  return __vmaxu2(most, word & 0x7FFF7FFFu);
}

// The largest half of `most` in the warp.
__device__ __forceinline__ uint32_t warp_max_magnitude(uint32_t most) {
  return __reduce_max_sync(0xFFFFFFFFu, max(most & 0xFFFFu, most >> 16));
}

// The scale for this launch. Every thread of a block calls it, in whole warps, in the kernel after
// amax_if_unset_kernel.
__device__ __forceinline__ float scale_to_use(const ScaleSource& source) {
  const float kept = source.kept == nullptr ? 0.0f : *source.kept;
  if (kept > 0.0f) return kept;
  uint32_t amax = 0;
  for (int i = threadIdx.x % 32; i < ScaleSource::kPartials; i += 32) amax = max(amax, __ldcg(source.partials + i));
  return scale_of_amax(__uint_as_float(__reduce_max_sync(0xFFFFFFFFu, amax)), source.fp8_max);
}

}  // namespace lorakernels
