// SPDX-License-Identifier: Apache-2.0
// The FP8 scale of a 16-bit tensor, known only on the device: the state's, or, where there is none yet (or in eval),
// the one that the tensor's own amax gives. A kernel in front of the quantizing one takes that amax if it is needed and
// returns at once if not; the quantizing kernel asks scale_to_use().
//
// An amax is the largest bit pattern of the magnitudes, as an unsigned integer: inf is above every number, NaN above
// inf.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/platform.h"
#include "host/float_type.h"

namespace lorakernels {

struct ScaleSource {
  const float* kept;   // the state's scale, taken if it is > 0; null in eval
  uint32_t* partials;  // [kPartials] scratch: amaxes of parts of the tensor, as bits of fp32; written only if needed
  float fp8_max;

  // How many blocks take the amax, one number each: the same on every GPU, for the quantizing kernels are compiled with
  // it. Two for each multiprocessor of an H100 or H200.
  static constexpr int kPartials = 264;
};

// Of an amax (reference.scale_of): 1 where it is 0, inf or NaN, FLT_MAX where the quotient overflows.
LORAKERNELS_HD float scale_of_amax(float amax, float fp8_max) {
  if (!(amax > 0.0f && amax <= FLT_MAX)) return 1.0f;
  const float scale = fp8_max / amax;
  return scale <= FLT_MAX ? scale : FLT_MAX;
}

// x: count elements of bf16 or fp16 without gaps, a multiple of 8, 16-byte aligned. Lets a kernel behind it that was
// launched with programmatic stream serialization start at once. device: CUDA ordinal, or -1 for the current one.
void launch_amax_if_unset(const ScaleSource& source, const void* x, int64_t count, FloatType dtype, void* stream,
                          int device);

}  // namespace lorakernels
