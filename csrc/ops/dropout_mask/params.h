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
  RowsOfTensor mapped;  // where rows lie in the logical tensor
  uint32_t first_col;   // where column 0 does
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(DropoutMaskParams& params, const Visit& visit) {
  visit(params.out, params.slot);
  visit.site(params.site);
}

struct DroppedBitsParams {
  uint32_t* dropped;      // [rows, dropped_words(cols)]
  int64_t rows;           // elements, below 2^31
  int64_t cols;           // elements, below 2^31
  DropoutParams dropout;  // threshold above 0, first_col a multiple of 8
};

template <typename Visit>
void each_address(DroppedBitsParams& params, const Visit& visit) {
  visit(params.dropped);
  each_address(params.dropout, visit);
}

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_dropout_mask(const DropoutMaskParams& params, void* stream, int device);

// Draws the mask as bits, laid out as device/dropout.h says.
void launch_dropped_bits(const DroppedBitsParams& params, void* stream, int device);

}  // namespace lorakernels
