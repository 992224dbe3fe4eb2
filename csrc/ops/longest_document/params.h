// SPDX-License-Identifier: Apache-2.0
// Checks that no document has more than `longest` tokens. Document i has those from starts[i] to starts[i + 1].
#pragma once

#include <cstdint>

namespace lorakernels {

struct LongestDocumentParams {
  const int32_t* starts;  // [documents + 1]
  int64_t documents;
  int64_t longest;
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(LongestDocumentParams& params, const Visit& visit) {
  visit(params.starts);
}

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_longest_document(const LongestDocumentParams& params, void* stream, int device);

}  // namespace lorakernels
