// SPDX-License-Identifier: Apache-2.0
// The dropout mask of a whole tensor, by the rule of device/philox.h, from a slot in device memory.
#pragma once

#include <cstdint>

#include "device/dropout.h"

namespace lorakernels {

struct DropoutMaskParams {
  uint8_t* out;         // [rows, cols] row-major: 1 keep, 0 drop
  const int64_t* slot;  // [2]: key, offset; device memory
  int64_t rows;         // elements
  int64_t cols;         // elements
  uint32_t site;        // stream id
  uint32_t threshold;   // of 65536
  uint32_t first_row;   // where out[0][0] lies in the logical tensor
  uint32_t first_col;
};

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_dropout_mask(const DropoutMaskParams& params, void* stream, int device);

// Draws the mask as bits [rows, dropped_words(cols)], laid out as device/dropout.h says. The threshold is above 0, and
// first_col is a multiple of 8.
void launch_dropped_bits(const DropoutParams& dropout, uint32_t* dropped, int64_t rows, int64_t cols, void* stream,
                         int device);

}  // namespace lorakernels
