// SPDX-License-Identifier: Apache-2.0
// For .cu files only: predicated stores, with a hint of how long the L2 cache keeps what they write. A branch around a
// store is what the compiler cannot move other instructions across.
#pragma once

#include <cstdint>

namespace lorakernels {

__device__ __forceinline__ void store_if(bool condition, void* to, const uint4& words, uint64_t policy) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.L2::cache_hint.v4.b32 [%1], {%2, %3, %4, %5}, %6;\n}" ::
          "r"(static_cast<int>(condition)),
      "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void store_if(bool condition, void* to, const uint2& words, uint64_t policy) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.L2::cache_hint.v2.b32 [%1], {%2, %3}, %4;\n}" ::"r"(
          static_cast<int>(condition)),
      "l"(to), "r"(words.x), "r"(words.y), "l"(policy)
      : "memory");
}

}  // namespace lorakernels
