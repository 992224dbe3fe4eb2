// SPDX-License-Identifier: Apache-2.0
// dA = dsᵀ D(x),  D(x) = mask ⊙ x / (1 − p), in one read of x [rows, cols], which is e4m3 bytes or has ds's dtype.
// The mask is drawn by this kernel, or given as an earlier one drew it. Products run on the tensor cores in ds's dtype,
// in which e4m3 is exact, with fp32 accumulation. A scale for each 1 × 128 of x is multiplied in before, and rounded.
// They are summed in an order that depends on LoraGradAGrid alone. 1 / (1 − p) and scale_inv are applied to the sum,
// which is rounded once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/dropout.h"
#include "device/float_type.h"
#include "device/platform.h"

namespace lorakernels {

struct LoraGradALimits {
  static constexpr int64_t kRank = 256;
  static constexpr int64_t kColsMultiple = 8;  // also of first_col
  static constexpr int64_t kFp8ColsMultiple = 16;
};

struct LoraGradAOperands {
  void* dA;                // [rank, cols] of out_dtype, 16-byte aligned
  float* partial;          // [slices, rank, cols] of LoraGradAGrid, 16-byte aligned; a cluster does not use it
  const void* ds;          // [rows, rank], rows ds_pitch elements apart, 16-byte aligned
  const void* x;           // [rows, cols], row-major without gaps, 16-byte aligned
  const float* scale_inv;  // [1], or in_blocks [⌈cols / 128⌉, rows]: x is e4m3 bytes; null: x has ds's dtype
  int64_t rows;            // elements, below 2^31 - 2^16
  int64_t cols;            // elements, a multiple of 8, of 16 with scale_inv; below 2^31
  int64_t rank;            // 1 to 256
  int64_t ds_pitch;        // a multiple of 8; a row's columns from rank on are zeros
  FloatType dtype;         // of ds: kBFloat16 or kFloat16
  FloatType out_dtype;
  DropoutDraws dropout;
  const uint32_t* dropped;  // [rows, dropped_words(cols)], the mask; null: draw it
  bool in_blocks;           // each 1 × 128 of x has a scale
};

// Apart, because nvcc 13.0 makes other code of a kernel with an argument of more than 128 bytes, also where it reads no
// mask.
struct LoraGradAParams : LoraGradAOperands {
  RowsOfTensor rows_of_mask;
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(LoraGradAParams& params, const Visit& visit) {
  visit(params.dA, params.partial, params.ds, params.x, params.scale_inv, params.dropped);
  each_address(params.dropout, visit);
}

// A block takes a strip of columns in a slice of the rows. Its kColWarps × kRowWarps warps share the strip's columns,
// and take the slice's rows in turns, 8 or 16 at a time. Ranks above 64 are parts of 64, each of which reads x.
struct LoraGradAGrid {
  static constexpr int kThreads = 256;
  static constexpr int kColWarps = 2;
  static constexpr int kRowWarps = kThreads / 32 / kColWarps;
  static constexpr int kStripCols = 64 * kColWarps;

  int padded_rank;  // of a part: 16, 32 or 64
  int64_t parts, strips, slices, slice_rows;

  LoraGradAGrid(int64_t rows, int64_t cols, int64_t rank, int64_t multiprocessors) : padded_rank(16), parts(1) {
    while (padded_rank < rank && padded_rank < 64) padded_rank *= 2;
    parts = std::max<int64_t>(1, (rank + padded_rank - 1) / padded_rank);
    strips = (cols + kStripCols - 1) / kStripCols;
    const int64_t resident = multiprocessors * (padded_rank == 64 ? 1 : 2);  // blocks that run at once
    const int64_t units = (rows + kUnitRows - 1) / kUnitRows;
    slices = best_slices(std::max<int64_t>(1, strips * parts), resident, std::max<int64_t>(1, units));
    slice_rows = (units + slices - 1) / slices * kUnitRows;
    slices = slice_rows == 0 ? 0 : (rows + slice_rows - 1) / slice_rows;
  }

 private:
  static constexpr int64_t kUnitRows = kRowWarps * 16, kMostSlices = 32;

  // The fewest slices that keep the GPU busy. Every slice's sums are written and read once more, but a last wave of
  // blocks that is not full leaves multiprocessors idle.
  static int64_t best_slices(int64_t blocks, int64_t resident, int64_t units) {
    int64_t best = 1;
    double least = 0.0;
    for (int64_t slices = 1; slices <= std::min(units, kMostSlices); ++slices) {
      const int64_t waves = (blocks * slices + resident - 1) / resident, depth = (units + slices - 1) / slices;
      const double cost = static_cast<double>(waves * (depth + 2));  // 2: the time of a block's begin and end, in units
      if (slices == 1 || cost < 0.97 * least) best = slices, least = cost;
    }
    return best;
  }
};

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_lora_grad_a(const LoraGradAParams& params, void* stream, int device);

}  // namespace lorakernels
