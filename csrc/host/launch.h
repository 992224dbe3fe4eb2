// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the launch of a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "host/cuda_check.h"
#include "host/device.h"

namespace lorakernels {

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes;  // dynamic
  bool early;
  dim3 cluster = dim3(1);  // how many neighbouring blocks form a cluster; more than one on Hopper or later alone
};

// Launches by the driver: the runtime would look for the function at every launch. The function takes shared_bytes
// already, and an early launch needs a GPU of Hopper or later. `arguments` has the address of each. The thread must
// have a context (bind_context).
void launch_function(cudaFunction_t function, const LaunchShape& shape, cudaStream_t stream, void** arguments);
// The same of a kernel of this extension, on the current device. Nothing is early on a GPU before Hopper.
void launch_kernel(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments);

// `early`: on Hopper and later the kernel may start while the previous one still runs, if that one calls
// let_next_kernel_start() (programmatic dependent launch). An early kernel calls wait_for_previous_kernel() of
// device/overlap.h before it touches memory that the previous one reads or writes.
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                   const Arguments&... arguments) {
  const auto launch = [&](const Parameters&... converted) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&converted))...};
    launch_kernel(reinterpret_cast<const void*>(kernel), shape, stream, pointers);
  };
  launch(arguments...);
}

template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   bool early, const Arguments&... arguments) {
  launch_kernel(kernel, LaunchShape{grid, block, shared_bytes, early}, stream, arguments...);
}

}  // namespace lorakernels
