// SPDX-License-Identifier: Apache-2.0
// For .cu files only.
#pragma once

#include <cstddef>

#include "host/cuda_check.h"

namespace lorakernels {

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
