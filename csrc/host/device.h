// SPDX-License-Identifier: Apache-2.0
// Calls of CUDA that are made once for each device, or kernel and device, and not at every launch. Any thread may call
// these functions.
#pragma once

#include <cuda_runtime.h>

namespace lorakernels {

struct Device {
  int capability_major;
  int capability_minor;
  int multiprocessors;
};

// What the calling thread's current device is.
Device current_device();

// `kernel` as the driver launches it on the current device, with so many bytes of dynamic shared memory allowed to it.
// CUDA asks for the latter above 48 KiB.
cudaFunction_t function_of(const void* kernel, int shared_bytes);

}  // namespace lorakernels
