// SPDX-License-Identifier: Apache-2.0
// out [cols, rows] = inᵀ, in [rows, cols], of bytes.
#pragma once

#include <cstdint>

namespace lorakernels {

struct TransposeFp8Params {
  uint8_t* out;
  const uint8_t* in;  // row-major without gaps, as is out
  int64_t rows;       // below 2^31 - 128
  int64_t cols;       // below 2^31 - 128
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(TransposeFp8Params& params, const Visit& visit) {
  visit(params.out, params.in);
}

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_transpose_fp8(const TransposeFp8Params& params, void* stream, int device);

}  // namespace lorakernels
