// SPDX-License-Identifier: Apache-2.0
// For .cu files only: functions of the CUDA driver, without linking libcuda.
#pragma once

#include <stdexcept>
#include <string>

#include "host/cuda_check.h"

namespace lorakernels {

// `name` of the driver's API as of CUDA 12.0, and later.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  LORAKERNELS_CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
#else
  LORAKERNELS_CHECK_CUDA(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the driver has no ") + name);
  return reinterpret_cast<Function>(function);
}

}  // namespace lorakernels
