// SPDX-License-Identifier: Apache-2.0
// For .cu files only: sums over the slices of a contraction that several blocks have shared.
#pragma once

#include <cstdint>

namespace lorakernels {

__device__ __forceinline__ void add(float& sum, float one) { sum += one; }
__device__ __forceinline__ void add(float4& sum, const float4& one) {
  sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
}

// load(0) + load(1) + … in this order. Eight loads are in flight at once, and those that are left as well. A loop
// unrolled by eight would wait for each of these.
template <typename Value, typename Load>
__device__ __forceinline__ Value sum_of_slices(uint32_t slices, const Load& load) {
  constexpr uint32_t kLoads = 8;
  Value sum{}, each[kLoads];
  uint32_t first = 0;
#pragma unroll 1
  for (; first + kLoads <= slices; first += kLoads) {
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) each[i] = load(first + i);
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) add(sum, each[i]);
  }
#pragma unroll
  for (uint32_t i = 0; i < kLoads - 1; ++i) {
    if (first + i < slices) each[i] = load(first + i);
  }
#pragma unroll
  for (uint32_t i = 0; i < kLoads - 1; ++i) {
    if (first + i < slices) add(sum, each[i]);
  }
  return sum;
}

}  // namespace lorakernels
