// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the launch of a kernel.
#pragma once

#include <cstddef>

#include "host/cuda_check.h"
#include "host/device.h"

namespace lorakernels {

// `early`: on Hopper and later the kernel may start while the previous one still runs, if that one calls
// let_next_kernel_start() (programmatic dependent launch). An early kernel calls wait_for_previous_kernel() of
// device/overlap.h before it touches memory that the previous one reads or writes.
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   bool early, const Arguments&... arguments) {
  if (shared_bytes > 0) allow_shared_memory(reinterpret_cast<const void*>(kernel), static_cast<int>(shared_bytes));
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early && current_device().capability_major >= 9 ? 1 : 0;
  LORAKERNELS_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace lorakernels
