// SPDX-License-Identifier: Apache-2.0
// For .cu files only: blocks that run at once on neighbouring multiprocessors (thread block clusters), from sm_90 on.
// Elsewhere a block is alone, and these functions do nothing.
#pragma once

#include <cstdint>

namespace lorakernels {

// Says that this thread has come to a barrier of all threads of the cluster, behind which they see what it wrote.
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The same, where others read nothing that this thread wrote.
__device__ __forceinline__ void arrive_without_writes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Waits until all threads of the cluster have come to it.
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Loads 16 bytes of the shared memory of another block, which has them at `address` of its own.
__device__ __forceinline__ float4 load_of_block(uint32_t address, uint32_t block_in_cluster) {
  float4 four{};
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
      : "r"(address), "r"(block_in_cluster)
      : "memory");
#endif
  return four;
}

}  // namespace lorakernels
