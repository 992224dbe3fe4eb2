// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>

#include "host/cuda_check.h"
#include "host/driver.h"
#include "host/kernel_launch.h"
#include "host/launch_list.h"

namespace lorakernels {
namespace {

using LaunchKernelEx = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);

}  // namespace

void LaunchList::launch(const LaunchValues& values, void* stream, int device) const {
  const DeviceGuard guard(device);
  for (const auto& each : launches_) each->run(values, stream);
}

void KernelLaunch::run(const LaunchValues& values, void* stream) const {
  static const auto launch = driver_function<LaunchKernelEx>("cuLaunchKernelEx");
  bind_context();
  uint64_t bits[kMostParameters];
  void* pointers[kMostParameters];
  for (size_t i = 0; i < parameters.size(); ++i) {
    bits[i] = parameters[i].is_address ? values.address(parameters[i].bits) : parameters[i].bits;
    pointers[i] = &bits[i];
  }
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
  config.blockDimX = threads, config.blockDimY = 1, config.blockDimZ = 1;
  config.sharedMemBytes = shared_bytes;
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  const CUresult code = launch(&config, static_cast<CUfunction>(function), pointers, nullptr);
  if (code != CUDA_SUCCESS) throw std::runtime_error("cuLaunchKernelEx failed: " + std::to_string(code));
}

}  // namespace lorakernels
