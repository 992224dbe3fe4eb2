// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>

#include "host/driver.h"
#include "host/launch.h"

namespace lorakernels {
namespace {

using LaunchKernelEx = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
using GetErrorName = CUresult (*)(CUresult, const char**);

std::string name_of(CUresult code) {
  const char* name = nullptr;
  driver_function<GetErrorName>("cuGetErrorName")(code, &name);
  return name == nullptr ? std::to_string(code) : name;
}

}  // namespace

void launch_function(cudaFunction_t function, const LaunchShape& shape, cudaStream_t stream, void** arguments) {
  static const auto launch = driver_function<LaunchKernelEx>("cuLaunchKernelEx");
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = shape.grid.x, config.gridDimY = shape.grid.y, config.gridDimZ = shape.grid.z;
  config.blockDimX = shape.block.x, config.blockDimY = shape.block.y, config.blockDimZ = shape.block.z;
  config.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  config.hStream = stream;
  config.attrs = &attribute, config.numAttrs = shape.early ? 1 : 0;
  const CUresult code = launch(&config, function, arguments, nullptr);
  if (code != CUDA_SUCCESS) throw std::runtime_error("cuLaunchKernelEx failed: " + name_of(code));
}

void launch_kernel(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments) {
  bind_context();
  const cudaFunction_t function = function_of(kernel, static_cast<int>(shape.shared_bytes));
  const bool early = shape.early && current_device().capability_major >= 9;
  launch_function(function, {shape.grid, shape.block, shape.shared_bytes, early}, stream, arguments);
}

}  // namespace lorakernels
