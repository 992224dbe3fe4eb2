// SPDX-License-Identifier: Apache-2.0
// For .cu files only.
#pragma once

#include <vector>

#include "host/cuda_check.h"

namespace lorakernels {

// A failed call also sets the thread's last error. It is cleared, so that the next check does not report it.
inline void check_and_clear(cudaError_t code, const char* call) {
  if (code != cudaSuccess) cudaGetLastError();
  check_cuda(code, call);
}
#define CHECK(call) ::lorakernels::check_and_clear((call), #call)

inline std::vector<cudaGraphNode_t> nodes_of(cudaGraph_t graph) {
  size_t size = 0;
  CHECK(cudaGraphGetNodes(graph, nullptr, &size));
  std::vector<cudaGraphNode_t> nodes(size);
  if (size > 0) CHECK(cudaGraphGetNodes(graph, nodes.data(), &size));
  return nodes;
}

}  // namespace lorakernels
