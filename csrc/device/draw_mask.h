// SPDX-License-Identifier: Apache-2.0
// For .cu files only: a dropout mask drawn as bits, by a kernel of its own or by warps that have nothing else to do.
#pragma once

#include "device/draws.h"

namespace lorakernels {

// A word of the mask, laid out as dropout.h says: 32 columns, dropped where the lanes of their draws have a sign bit.
__device__ __forceinline__ uint32_t bits_of_signs(const PhiloxDraw (&draws)[4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t at = dropped_shift(d) + 2 * w;
      bits |= draws[d].word[w] >> (15 - at) & 0x00010001u << at;
    }
  }
  return bits;
}

constexpr uint32_t kMostRowsOfUnit = 8;

// Draws this block's rows of the mask [rows, dropped_words(cols)]. Whole warps call it, each when it has time. A warp
// takes one unit after the other, 32 words in up to kMostRowsOfUnit rows, until none is left. Of few words units are
// smaller, so that all warps of the block get one. `count`, in shared memory and 0 at first, is how many units were
// taken. With kRuns, rows that follow each other are placed once for all, which takes two registers more.
template <bool kRuns = true>
__device__ __forceinline__ void draw_mask(const DropoutParams& dropout, uint32_t* dropped, int64_t rows, int64_t cols,
                                          uint32_t* count) {
  const uint32_t lane = threadIdx.x % 32, words = static_cast<uint32_t>(dropped_words(cols)),
                 across = (words + 31) / 32;
  const auto begin = static_cast<uint32_t>(rows * blockIdx.x / gridDim.x);
  const auto end = static_cast<uint32_t>(rows * (blockIdx.x + 1) / gridDim.x);
  const uint32_t of_warp = (end - begin) * across / (blockDim.x / 32);
  const uint32_t rows_of_unit = min(max(of_warp, 1u), kMostRowsOfUnit);
  const uint32_t units = (end - begin + rows_of_unit - 1) / rows_of_unit * across;
  const uint64_t seed = dropout.slot[0];
  const auto offset = static_cast<uint32_t>(dropout.slot[1]);
  const auto take = [&] { return __shfl_sync(0xFFFFFFFFu, lane == 0 ? atomicAdd(count, 1u) : 0, 0); };
  uint32_t unit = take();
  if (unit >= units) return;  // before it waits for the seed
  const RoundKeys keys(seed);
  const Threshold threshold(dropout.threshold);
  for (; unit < units; unit = take()) {
    const uint32_t word = unit % across * 32 + lane, first = begin + unit / across * rows_of_unit;
    DrawsOfColumn columns[4];
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      columns[d] = DrawsOfColumn(dropout.first_col / kDropoutLanesPerDraw + word * 4 + d, offset, seed);
    }
    const auto draw_row = [&](uint32_t row, uint32_t at) {
      const DrawsOfRow of_row(at, offset, dropout.site, seed);
      const uint4 of = make_uint4(of_row.word[0], of_row.word[1], of_row.word[2], of_row.word[3]);
      PhiloxDraw draws[4];
#pragma unroll
      for (int d = 0; d < 4; ++d) draws[d] = columns[d].after_three(of);
      keys.draw<3>(draws);
      threshold.apply(draws);
      if (word < words) dropped[static_cast<int64_t>(row) * words + word] = bits_of_signs(draws);
    };
    const uint32_t stop = min(first + rows_of_unit, end);
    for (uint32_t row = first; row < stop;) {
      if constexpr (kRuns) {
        const uint32_t run = min(stop, dropout.rows.until(row)), shift = dropout.rows(row) - row;
        for (; row < run; ++row) draw_row(row, shift + row);
      } else {
        draw_row(row, dropout.rows(row)), ++row;
      }
    }
  }
}

}  // namespace lorakernels
