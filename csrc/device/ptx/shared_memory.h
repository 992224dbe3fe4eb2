// SPDX-License-Identifier: Apache-2.0
// For .cu files only: loads and stores of shared memory by its 32-bit addresses.
#pragma once

#include <cstdint>

namespace lorakernels {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void store_float(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ float2 load_floats(uint32_t address) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(address) : "memory");
  return two;
}
__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Stores four matrices of 8 × 8 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8. Its word i
// holds element 2 (l % 4), and the next, of row l / 4 of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

// Loads four matrices of 8 × 8 pairs of bytes and transposes them. Lane l gives the address of row l % 8 of matrix l
// / 8. Its word i gets pair l / 4 of row 2 (l % 4), and of the next row, of matrix i.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&word)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}

// Makes what this thread wrote to shared memory visible to wgmma and to the tensor copy engine.
__device__ __forceinline__ void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace lorakernels
