// SPDX-License-Identifier: Apache-2.0
// For .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lorakernels {

// Puts a kernel node in the place of each memset node of `graph` that a kernel can stand for: it writes the same bytes
// after the same nodes and before the same nodes. Such a memset writes 1 to `most_bytes` bytes without gaps, in memory
// of the current device. The others stay, and so do all in child graphs, and in a graph that allocates or frees memory,
// which CUDA does not let one edit. Equal captures are edited alike, so that one can still update the other. Returns
// how many were replaced. If it throws, the graph is good only to be destroyed.
int64_t replace_memset_nodes(cudaGraph_t graph, uint64_t most_bytes);

}  // namespace lorakernels
