// SPDX-License-Identifier: Apache-2.0
// What a kernel is given to draw its part of a mask by philox.h's rule, and the form of a mask as bits.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "device/philox.h"
#include "device/row_chunks.h"

namespace lorakernels {

struct DropoutDraws {
  const int64_t* slot;  // [2]: key, offset; device memory; null if threshold is 0
  uint32_t site;        // stream id
  uint32_t threshold;   // of 65536; 0 draws nothing
  uint32_t first_col;   // where column 0 lies in the logical tensor
};

struct DropoutParams : DropoutDraws {
  RowsOfTensor rows;  // where rows lie
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(DropoutDraws& params, const Visit& visit) {
  visit(params.slot);
  if (params.threshold > 0) visit.site(params.site);
}

// A mask that one kernel draws and others read has a bit for each element, set where the element is dropped. A word has
// 32 columns, and rows are dropped_words(cols) words apart. Column 8 d + 2 w + h of the 32 has bit
// 16 h + 8 (d % 2) + 2 w + d / 2.
LORAKERNELS_HD int64_t dropped_words(int64_t cols) { return (cols + 127) / 128 * 4; }
LORAKERNELS_HD uint32_t dropped_shift(uint32_t draw) { return draw % 2 * 8 + draw / 2; }

inline void check_threshold(uint32_t threshold) {
  if (threshold >= kDropoutLaneRange) {
    throw std::invalid_argument("threshold must be in [0, 65535], got " + std::to_string(threshold));
  }
}

}  // namespace lorakernels
