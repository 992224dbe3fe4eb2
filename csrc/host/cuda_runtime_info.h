// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lorakernels {

struct CudaDeviceInfo {
  std::string name;
  int capability_major;
  int capability_minor;
  int multiprocessors;
  size_t memory_bytes;
};

// Versions are CUDA's integers, 13000 for 13.0; driver_version is 0 without a driver.
struct CudaRuntimeInfo {
  bool compiled = false;
  int runtime_version = 0;
  int driver_version = 0;
  std::vector<CudaDeviceInfo> devices;
  std::string error;  // why there are no devices, as CUDA says it
};

// A missing driver or device is an answer, in `error`, and not an exception.
CudaRuntimeInfo cuda_runtime_info();

}  // namespace lorakernels
