// SPDX-License-Identifier: Apache-2.0
// Reads 4 bytes a document and writes nothing. FlashAttention-2 launches blocks for `longest` tokens, and computes no
// later token of a longer document. Here that is an assertion, as only the device knows where documents begin. One
// block is enough: a row has hundreds of documents at most.
#include <cassert>

#include "device/overlap.h"
#include "host/launch.h"
#include "ops/longest_document/params.h"

namespace lorakernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) longest_document_kernel(const LongestDocumentParams params) {
  begin_after_previous_kernel();
  for (int64_t i = threadIdx.x; i < params.documents; i += kThreads) {
    const int64_t tokens = int64_t{params.starts[i + 1]} - params.starts[i];
    assert(tokens <= params.longest && "max_length_q must be at least the tokens of each document in cu_seq_lens_q");
  }
}

}  // namespace

void launch_longest_document(const LongestDocumentParams& params, void* stream, int device) {
  if (params.documents == 0) return;
  const DeviceGuard guard(device);
  launch_kernel(longest_document_kernel, 1, kThreads, 0, static_cast<cudaStream_t>(stream), true, params);
}

}  // namespace lorakernels
