// SPDX-License-Identifier: Apache-2.0
// For .cu files only: elements as fp32, and two 16-bit ones in a 32-bit word, T being __nv_bfloat16 or __half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/float_type.h"

namespace lorakernels {

__device__ __forceinline__ float as_float(const void* source, int64_t at, FloatType dtype) {
  switch (dtype) {
    case FloatType::kFloat32:
      return static_cast<const float*>(source)[at];
    case FloatType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(source)[at]);
    default:
      return __half2float(static_cast<const __half*>(source)[at]);
  }
}

// For bf16 this is one instruction for each element, where cuda_bf16.h's conversion takes three.
template <typename T>
__device__ __forceinline__ float2 unpacked(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
}

template <typename T>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(two);
  } else {
    const __half2 two = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(two);
  }
}

}  // namespace lorakernels
