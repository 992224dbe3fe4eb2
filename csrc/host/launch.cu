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
  CUlaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (shape.early) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  CUlaunchConfig config{};
  config.gridDimX = shape.grid.x, config.gridDimY = shape.grid.y, config.gridDimZ = shape.grid.z;
  config.blockDimX = shape.block.x, config.blockDimY = shape.block.y, config.blockDimZ = shape.block.z;
  config.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
  config.hStream = stream;
  config.attrs = attributes, config.numAttrs = count;
  const CUresult code = launch(&config, function, arguments, nullptr);
  if (code != CUDA_SUCCESS) throw std::runtime_error("cuLaunchKernelEx failed: " + name_of(code));
}

void launch_kernel(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments) {
  bind_context();
  const cudaFunction_t function = function_of(kernel, static_cast<int>(shape.shared_bytes));
  LaunchShape here = shape;
  here.early = shape.early && current_device().capability_major >= 9;
  launch_function(function, here, stream, arguments);
}

}  // namespace lorakernels
