// SPDX-License-Identifier: Apache-2.0
// In one read of dy [rows, cols]:
//   dy8 = sat(dy · scale)   amax = max |dy|   ds = scaling · dy B   dB = scaling · dyᵀ s
// Instead of one scale there may be one for each 1 × 128 of dy, of that block's own amax.
// B [cols, rank] is rounded to dy's dtype; s and ds [rows, rank] have it. dy may be of several projections side by
// side. Their B stand one below the other then, and their columns of s and ds, their windows, side by side:
//   ds[:, window i] = scaling · dy[:, cols i] B[cols i]   dB[cols i] = scaling · dy[:, cols i]ᵀ s[:, window i]
// Products run on the tensor cores with fp32 accumulation. Each block writes its sums to a workspace. A second kernel
// adds the blocks' sums in an order that depends on QuantizeGradGrid alone, scales and rounds once. If dy8 has no scale
// yet, the blocks leave their amaxes, and the second kernel reads dy again and makes dy8. Without an adapter there is
// no second kernel, and amax_if_unset_kernel runs first. The time goes into memory traffic, so a dropout mask can be
// drawn at the same time, for lora_grad_a and fp8_grad_input to read. For sm_90a.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "device/dropout.h"
#include "device/float_type.h"
#include "ops/amax/params.h"

namespace lorakernels {

struct QuantizeGradLimits {
  static constexpr int64_t kRank = 128;
  static constexpr int64_t kDrawnRank = 64;          // with a mask to draw: a higher rank leaves too few registers
  static constexpr int64_t kColsMultiple = 8;        // also of first_col
  static constexpr int64_t kBlockColsMultiple = 16;  // of cols, where blocks have scales
};

// Which projection each column of dy belongs to. One projection has all columns.
struct QuantizeGradProjections {
  static constexpr int kMost = 4;
  static constexpr int kMultiple = 128;  // of the columns of each projection but the last

  int count;
  int end[kMost];     // behind its columns; entries from `count` on repeat the last
  int window[kMost];  // its first column in s and ds; -1 without an adapter
  int64_t pitch;      // columns of s and ds: all windows together

  // widths_and_ranks: (columns, rank) of each of 1 to kMost projections; rank 0 without an adapter.
  explicit QuantizeGradProjections(const std::vector<std::pair<int64_t, int64_t>>& widths_and_ranks)
      : count(static_cast<int>(widths_and_ranks.size())), pitch(0) {
    int64_t columns = 0;
    for (int i = 0; i < kMost; ++i) {
      window[i] = -1;
      if (i < count) {
        const auto [width, rank] = widths_and_ranks[i];
        columns += width;
        if (rank > 0) window[i] = static_cast<int>(pitch);
        pitch += rank;
      }
      end[i] = static_cast<int>(columns);
    }
  }

  LORAKERNELS_HD int begin(int i) const { return i == 0 ? 0 : end[i - 1]; }
  LORAKERNELS_HD int of(int col) const {
    int i = 0;
    for (int each = 0; each < kMost - 1; ++each) i += col >= end[each];
    return i;
  }
};

struct QuantizeGradParams {
  uint8_t* dy8;       // [rows, cols]
  float* scale_inv;   // [1], or in_blocks [⌈cols / 128⌉, rows]; or null: dy is not quantized
  float* amax;        // raised to max |dy|, with NaN above inf; null in eval or without scale_inv
  void* ds;           // [rows, pitch] of dy's dtype; null with rank 0
  void* dB;           // [cols, rank] of b_dtype, or null
  float* workspace;   // as large as QuantizeGradGrid::floats says
  const void* dy;     // [rows, cols], row-major without gaps, 16-byte aligned
  const void* B;      // [cols, rank] of b_dtype; null with rank 0
  const void* s;      // [rows, pitch] of dy's dtype; null without dB
  ScaleSource scale;  // of dy8; used with scale_inv only, and of it fp8_max alone in_blocks. With an adapter each block
                      // of quantize_grad_kernel has one of the partials.
  int64_t rows;       // elements, below 2^31 - 128
  int64_t cols;       // elements, a multiple of 8, below 2^31 - 512
  int64_t rank;       // 0 to 128, of every adapter
  float scaling;      // alpha / r, or alpha / √r
  FloatType dtype;    // of dy, s, ds: kBFloat16 or kFloat16
  FloatType b_dtype;  // of B, dB
  bool is_e5m2;       // dy8 is e5m2, else e4m3
  bool in_blocks;     // each 1 × 128 has its scale; cols a multiple of 16
  bool power_of_two;  // scales of blocks are powers of two
  QuantizeGradProjections projections;

  // The dropout mask of the layer's input, to be drawn for the kernels that follow; the rank is 1 to 64 then.
  uint32_t* dropped;      // [rows, dropped_words(dropped_cols)], 16-byte aligned; or null
  int64_t dropped_cols;   // below 2^31
  DropoutParams dropout;  // first_col a multiple of 8
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(QuantizeGradParams& params, const Visit& visit) {
  visit(params.dy8, params.scale_inv, params.amax, params.ds, params.dB, params.workspace, params.dy, params.B,
        params.s);
  visit(params.dropped);
  each_address(params.scale, visit);
  each_address(params.dropout, visit);
}

// dy is cut into strips of columns, each within one projection, and into panels of rows. (strip, panel) pairs are
// numbered strip by strip, and each block takes a run of them. A block's partial dB for one strip is a *segment*. From
// one segment to the next either the block or the strip goes up by one, so `block + strip` numbers them without gaps or
// repeats.
struct QuantizeGradGrid {
  static constexpr int kPanelRows = 128;
  static constexpr int kTileCols = 128;

  int padded_rank;  // 16, 32, 64 or 128; 16 if rank is 0
  int steps;  // tiles of a strip: as many as registers hold dB for. One where wider strips would leave multiprocessors
              // idle or hold columns of two projections.
  int strip_cols;
  int64_t rows, cols, strips, panels, blocks;
  int64_t ds_floats;  // of the partial ds

  QuantizeGradGrid(int64_t rows, int64_t cols, int64_t rank, const QuantizeGradProjections& projections,
                   int64_t multiprocessors)
      : padded_rank(16), rows(rows), cols(cols) {
    while (padded_rank < rank) padded_rank *= 2;
    panels = (rows + kPanelRows - 1) / kPanelRows;
    steps = most_steps(padded_rank);
    if ((cols + steps * kTileCols - 1) / (steps * kTileCols) * panels < multiprocessors) steps = 1;
    for (int i = 0; i + 1 < projections.count; ++i) {
      if (projections.end[i] % (steps * kTileCols) != 0) steps = 1;
    }
    strip_cols = steps * kTileCols;
    strips = (cols + strip_cols - 1) / strip_cols;
    ds_floats = strips * panels * kPanelRows * padded_rank;
    // each block may leave an amax
    blocks = std::clamp<int64_t>(strips * panels, 1, std::min<int64_t>(multiprocessors, ScaleSource::kPartials));
  }

  static constexpr LORAKERNELS_HD int most_steps(int padded_rank) { return padded_rank <= 64 ? 4 : 2; }

  LORAKERNELS_HD int64_t first_pair(int64_t block) const { return block * strips * panels / blocks; }
  LORAKERNELS_HD int64_t block_of(int64_t pair) const { return ((pair + 1) * blocks - 1) / (strips * panels); }

  // The workspace holds partial ds [strips, panels, sums of a panel], then partial dB [segments, steps, sums of a
  // tile's columns]. The sums of 128 rows or columns are two blocks of [64, padded rank], one for each warpgroup. A
  // block is stored as the threads hold it (device/ptx/wgmma.h), four numbers of a thread at a time: [padded rank / 8,
  // 128, 4].
  LORAKERNELS_HD int64_t segment_floats() const { return static_cast<int64_t>(strip_cols) * padded_rank; }
  int64_t floats(bool has_dB) const { return ds_floats + (has_dB ? (blocks + strips - 1) * segment_floats() : 0); }
};

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_quantize_grad(const QuantizeGradParams& params, void* stream, int device);

}  // namespace lorakernels
