// SPDX-License-Identifier: Apache-2.0
// For .cu files only: barriers in shared memory that count threads and bytes (PTX ISA, "mbarrier"), from sm_90 on.
#pragma once

#include <cstdint>

namespace lorakernels {

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialized barriers visible to the tensor copy engine. The thread that initialized them calls it.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the barrier's phase of that parity, 0 or 1, has ended.
__device__ __forceinline__ void wait_for(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\n"
      "bra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace lorakernels
