// SPDX-License-Identifier: Apache-2.0
// The FP8 scale of a 16-bit tensor, which is known only on the device. It is the state's scale. If there is none yet,
// and in eval, the tensor's own amax gives it. A kernel that reads the tensor anyway leaves amaxes of its parts, and
// the one after it quantizes with scale_of_partials(). Where none does, amax_if_unset_kernel runs before the quantizing
// kernel. It takes the amax if it is needed and returns at once if not. The quantizing kernel calls scale_to_use().
//
// An amax is the largest bit pattern of the magnitudes, compared as unsigned integers: inf is above every number, and
// NaN is above inf.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/float_type.h"
#include "device/platform.h"

namespace lorakernels {

struct ScaleSource {
  const float* kept;   // the state's scale, taken if it is > 0; null in eval
  uint32_t* partials;  // [kPartials] scratch: the bits of fp32 amaxes of parts of the tensor, written only if needed
  float fp8_max;

  // How many blocks of amax_if_unset_kernel write one number each: two for each of the 132 multiprocessors of an H100
  // or H200. It is the same on every GPU, because the quantizing kernels are compiled with it. Other kernels write at
  // most as many.
  static constexpr int kPartials = 264;
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(ScaleSource& params, const Visit& visit) {
  visit(params.kept, params.partials);
}

// The scale that an amax gives, as reference.scale_of: 1 if the amax is 0, inf or NaN; FLT_MAX if the quotient
// overflows.
LORAKERNELS_HD float scale_of_amax(float amax, float fp8_max) {
  if (!(amax > 0.0f && amax <= FLT_MAX)) return 1.0f;
  const float scale = fp8_max / amax;
  return scale <= FLT_MAX ? scale : FLT_MAX;
}

// x has `count` elements of bf16 or fp16 without gaps, a multiple of 8, and is 16-byte aligned. A kernel that is
// launched early (host/launch.h) after this one starts at once. device: CUDA ordinal, or -1 for the current one.
void launch_amax_if_unset(const ScaleSource& source, const void* x, int64_t count, FloatType dtype, void* stream,
                          int device);

}  // namespace lorakernels
