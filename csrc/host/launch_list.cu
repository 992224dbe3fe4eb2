// SPDX-License-Identifier: Apache-2.0
#include "host/cuda_check.h"
#include "host/kernel_launch.h"
#include "host/launch.h"
#include "host/launch_list.h"

namespace lorakernels {

void LaunchList::launch(const LaunchValues& values, void* stream, int device) const {
  const DeviceGuard guard(device);
  for (const auto& each : launches_) each->run(values, stream);
}

void KernelLaunch::run(const LaunchValues& values, void* stream) const {
  bind_context();
  uint64_t bits[kMostParameters];
  void* pointers[kMostParameters];
  for (size_t i = 0; i < parameters.size(); ++i) {
    bits[i] = parameters[i].is_address ? values.address(parameters[i].bits) : parameters[i].bits;
    pointers[i] = &bits[i];
  }
  const LaunchShape shape{{grid[0], grid[1], grid[2]}, threads, shared_bytes, early};
  launch_function(static_cast<cudaFunction_t>(function), shape, static_cast<cudaStream_t>(stream), pointers);
}

}  // namespace lorakernels
