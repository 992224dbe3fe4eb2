// SPDX-License-Identifier: Apache-2.0
#include "host/cuda_check.h"
#include "host/cuda_runtime_info.h"

namespace lorakernels {

CudaRuntimeInfo cuda_runtime_info() {
  CudaRuntimeInfo info;
  info.compiled = true;
  LORAKERNELS_CHECK_CUDA(cudaRuntimeGetVersion(&info.runtime_version));
  LORAKERNELS_CHECK_CUDA(cudaDriverGetVersion(&info.driver_version));
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    cudaGetLastError();
    info.error = std::string(cudaGetErrorName(code)) + ": " + cudaGetErrorString(code);
    return info;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    LORAKERNELS_CHECK_CUDA(cudaGetDeviceProperties(&properties, i));
    info.devices.push_back({properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                            properties.totalGlobalMem});
  }
  return info;
}

}  // namespace lorakernels
