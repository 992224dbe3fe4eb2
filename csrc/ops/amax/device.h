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

// The state's scale, or 0 if there is none.
__device__ __forceinline__ float kept_scale(const ScaleSource& source) {
  const float kept = source.kept == nullptr ? 0.0f : *source.kept;
  return kept > 0.0f ? kept : 0.0f;
}

// The scale that the first `count` partial amaxes give. Whole warps call it.
__device__ __forceinline__ float scale_of_partials(const ScaleSource& source, int count) {
  uint32_t amax = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) amax = max(amax, __ldcg(source.partials + i));
  return scale_of_amax(__uint_as_float(__reduce_max_sync(0xFFFFFFFFu, amax)), source.fp8_max);
}

// The scale for this launch. Every thread of a block calls it, in whole warps, in the kernel after
// amax_if_unset_kernel.
__device__ __forceinline__ float scale_to_use(const ScaleSource& source) {
  const float kept = kept_scale(source);
  return kept > 0.0f ? kept : scale_of_partials(source, ScaleSource::kPartials);
}

// n / x, rounded once, for an x from 2^-60 to 2^100 and a quotient as moderate. The steps are those that nvcc compiles
// for a quotient. It adds a call for other numbers, which costs registers wherever there is one.
__device__ __forceinline__ float moderate_quotient(float n, float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  inverse = __fmaf_rn(__fmaf_rn(-x, inverse, 1.0f), inverse, inverse);
  float quotient = __fmul_rn(n, inverse);
  quotient = __fmaf_rn(__fmaf_rn(-x, quotient, n), inverse, quotient);
  return __fmaf_rn(__fmaf_rn(-x, quotient, n), inverse, quotient);
}

struct BlockScale {
  float scale, inverse;
};

// Those of a block with this amax, a bf16 or fp16 number, as numerics/blocks.py's quantize_rows: the inverse is NaN
// where the amax is inf or NaN. power_of_two: the largest power that is not above the scale, 2^126 at most. Every amax
// and format was compared with correctly rounded quotients; tests/ops/cases/quantize_grad.py has all amaxes, too.
__device__ __forceinline__ BlockScale scale_of_block(float amax, float fp8_max, bool power_of_two) {
  const bool finite = amax <= FLT_MAX;
  const float nearer = amax < 0x1p-20f ? 0x1p110f : amax > 0x1p60f ? 0x1p-40f : 1.0f;
  float scale = fminf(__fmul_rn(moderate_quotient(fp8_max, amax * nearer), nearer), FLT_MAX);
  if (!finite || amax == 0.0f) scale = 1.0f;
  if (power_of_two) scale = __uint_as_float(min(__float_as_uint(scale) & 0x7F800000u, 0x7E800000u));
  const float closer = scale < 0x1p-60f ? 0x1p40f : scale > 0x1p60f ? 0x1p-100f : 1.0f, moderate = scale * closer;
  float inverse = __fmul_rn(moderate_quotient(1.0f, moderate), closer);
  if (scale > 0x1p126f) {  // the inverse is subnormal, and was rounded twice: compared with half of its last place
    const float rest = __fmaf_rn(-inverse * 0x1p100f, moderate, 1.0f), half = moderate * 0x1p-50f;
    inverse = __uint_as_float(__float_as_uint(inverse) + (rest > half) - (rest < -half));
  }
  return {scale, finite ? inverse : __uint_as_float(0x7FC00000u)};
}

}  // namespace lorakernels
