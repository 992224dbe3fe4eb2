// SPDX-License-Identifier: Apache-2.0
// For .cu files only: kernels that are launched while the previous one still runs (programmatic dependent launch, from
// sm_90 on; host/launch.h). Elsewhere they run one after the other, and these functions do nothing.
#pragma once

namespace lorakernels {

// Lets the next kernel start once every block of this grid has called it or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Waits until the previous kernel has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The first statement of a kernel that starts early. Every thread must call it, even one without work. Otherwise this
// grid could end before the previous one has, and the next kernel would read what is not written yet.
__device__ __forceinline__ void begin_after_previous_kernel() {
  let_next_kernel_start();
  wait_for_previous_kernel();
}

}  // namespace lorakernels
