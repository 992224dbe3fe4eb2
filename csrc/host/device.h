// SPDX-License-Identifier: Apache-2.0
// What is asked of CUDA, or told to it, once for a device, and not at every launch. Safe to call from several threads.
#pragma once

namespace lorakernels {

struct Device {
  int capability_major;
  int capability_minor;
  int multiprocessors;
};

// Of the calling thread's current device.
Device current_device();

// Lets `kernel` take that many bytes of dynamic shared memory on the current device, as those above 48 KiB need.
void allow_shared_memory(const void* kernel, int bytes);

}  // namespace lorakernels
