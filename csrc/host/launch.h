// SPDX-License-Identifier: Apache-2.0
// For .cu files only.
#pragma once

#include <cstddef>

#include "host/cuda_check.h"

namespace lorakernels {

// What an early kernel does first that neither reads nor writes before: wait for that end, and let the next one start.
// It must do so in all its threads even where it has no work: only then has all that came before it ended as well.
__device__ __forceinline__ void begin_after_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// early: on Hopper and later the kernel may start before the one in front of it, one of ours that lets it, has ended
// (programmatic dependent launch); it calls cudaGridDependencySynchronize() before it reads what that one writes.
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   bool early, const Arguments&... arguments) {
  int device = 0, major = 0;
  LORAKERNELS_CHECK_CUDA(cudaGetDevice(&device));
  LORAKERNELS_CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early && major >= 9 ? 1 : 0;
  LORAKERNELS_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace lorakernels
