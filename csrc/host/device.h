// SPDX-License-Identifier: Apache-2.0
// Calls of CUDA that are made once for each device, or kernel and device, and not at every launch. Any thread may call
// these functions.
#pragma once

namespace lorakernels {

struct Device {
  int capability_major;
  int capability_minor;
  int multiprocessors;
};

// What the calling thread's current device is.
Device current_device();

// Lets `kernel` take so many bytes of dynamic shared memory on the current device. CUDA asks for it above 48 KiB.
void allow_shared_memory(const void* kernel, int bytes);

}  // namespace lorakernels
