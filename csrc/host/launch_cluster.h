// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the launch of a kernel whose neighbouring blocks form clusters.
#pragma once

#include "host/cuda_check.h"
#include "host/device.h"

namespace lorakernels {

// Blocks of a kernel, and how many of them that are neighbours form a cluster.
struct Clusters {
  dim3 grid, cluster;
  int threads, shared_bytes;
};

// launch_kernel() of host/launch.h, early, on Hopper or later. A cluster's blocks lie on multiprocessors of one group.
// Those of an H100 hold 62 clusters of four blocks where 66 would have room, but as many clusters of two as there are
// pairs.
template <typename... Parameters, typename... Arguments>
void launch_clusters(void (*kernel)(Parameters...), const Clusters& clusters, cudaStream_t stream,
                     const Arguments&... arguments) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), clusters.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = clusters.grid;
  config.blockDim = dim3(static_cast<unsigned>(clusters.threads));
  config.dynamicSmemBytes = static_cast<size_t>(clusters.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = clusters.cluster.x, attributes[1].val.clusterDim.y = clusters.cluster.y;
  attributes[1].val.clusterDim.z = clusters.cluster.z;
  config.attrs = attributes;
  config.numAttrs = 2;
  LORAKERNELS_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace lorakernels
