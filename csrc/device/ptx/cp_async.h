// SPDX-License-Identifier: Apache-2.0
// For .cu files only: copies from global to shared memory that each thread waits for by itself (PTX ISA, "cp.async").
// Every wrapper clobbers memory, so that the compiler moves no load of what was copied above the wait for it.
#pragma once

#include <cstdint>

namespace lorakernels {

// Starts to copy kBytes bytes, 4, 8 or 16; writes zeros if the source does not exist. 16 bytes bypass the L1 cache.
template <int kBytes = 16>
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool exists) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(exists ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(target), "l"(source), "r"(exists ? kBytes : 0),
                 "n"(kBytes)
                 : "memory");
  }
}

// Makes one group of this thread's copies since its last call.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the newest `kPending` are done.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all of this thread's copies are done, committed or not.
__device__ __forceinline__ void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace lorakernels
