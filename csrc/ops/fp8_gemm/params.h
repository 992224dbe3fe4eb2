// SPDX-License-Identifier: Apache-2.0
// FP8 matrix products with the adapter's product inside, rounded once:
//
//   fp8_linear_lora   y  = x8 W8ᵀ + factor · s Bᵀ + bias + residual        u = s,  v = Bᵀ, stored as B
//   fp8_grad_input    dx = dy8 W8 + factor · keep ⊙ (ds A)                 u = ds, v = A
//
// The operands' scales are multiplied in. `keep` is the dropout mask by the rule of device/philox.h, drawn again or
// given as bits. The rows may be in groups with a weight and an adapter each, as those of experts are; a group begins
// at a multiple of kGroupRows rows. Hopper's FP8 tensor cores read only operands whose rows run along the contraction.
// For fp8_linear_lora W8 is stored that way. fp8_grad_input takes it untransposed, as it is stored
// (sm90_untransposed.h), and transposed where operands are in blocks. For sm_90a.
#pragma once

#include <cstdint>

#include "device/dropout.h"
#include "device/float_type.h"
#include "device/platform.h"

namespace lorakernels {

struct Fp8GemmLimits {
  static constexpr int64_t kColsMultiple = 8;  // also of first_col and u_stride
  static constexpr int64_t kUntransposedColsMultiple = 16;
  static constexpr int64_t kDepthMultiple = 16;
  static constexpr int64_t kGroupRows = 128;  // at whose multiples a group of rows begins
};

// Where v of fp8_linear_lora is not zero, if it has the matrices of several projections on its diagonal. Without any,
// it may be anywhere.
struct Fp8GemmBlocks {
  static constexpr int kMost = 4;

  int count;
  int col_end[kMost], rank_end[kMost];  // behind the columns and the ranks of each; entries from `count` on: the last

  LORAKERNELS_HD int of(int64_t col) const {
    int i = 0;
    for (int each = 0; each < kMost - 1; ++each) i += col >= col_end[each];
    return i;
  }
  // The ranks of `cols` columns from `col` on: the first, and the one behind the last.
  LORAKERNELS_HD int first_rank(int64_t col) const {
    const int i = of(col);
    return i == 0 ? 0 : rank_end[i - 1];
  }
  LORAKERNELS_HD int last_rank(int64_t col, int cols) const { return rank_end[of(col + cols - 1)]; }
};

struct Fp8GemmParams {
  void* out;                     // [rows, cols] of dtype, 16-byte aligned
  const uint8_t* left;           // [rows, depth] e4m3, or e5m2 for fp8_grad_input, 16-byte aligned
  const uint8_t* right;          // [cols, depth] e4m3, 16-byte aligned; untransposed: [depth, cols]
  const float* left_scale_inv;   // [1], the factor of each element of left; in_blocks: [⌈depth / 128⌉, rows]
  const float* right_scale_inv;  // [1], or in_blocks one of each block of the weight, or [cols] for fp8_linear_lora:
                                 // one for each row of right
  bool by_column;                // right_scale_inv is [cols]
  const void* u;                 // [rows, u_stride] of dtype, 16-byte aligned; null with rank 0
  const void* v;                 // [rank, cols], or [cols, u_stride] for fp8_linear_lora; 16-byte aligned
  const void* bias;              // [cols], or null; fp8_linear_lora only
  const void* residual;          // [rows, cols] of dtype, 16-byte aligned, or null; fp8_linear_lora only
  int64_t rows;                  // below 2^31 - 256
  int64_t cols;                  // a multiple of 8, below 2^31 - 256
  int64_t depth;                 // a positive multiple of 16, below 2^31 - 256
  int64_t rank;                  // 0: no adapter
  int64_t u_stride;              // elements, a multiple of 8, at least rank; columns from rank on are zeros
  Fp8GemmBlocks blocks;          // of v; fp8_linear_lora without groups only. Where v is zero, u is not read
  float factor;                  // of the adapter's product
  DropoutParams dropout;         // fp8_grad_input only; first_col a multiple of 8
  const uint32_t* dropped;       // [rows, dropped_words(cols)], the mask; null: draw it
  const int32_t* group_of;       // [rows / kGroupRows], or null: whose group such rows are; negative: not computed
  int64_t groups;                // right, right_scale_inv, v: one after the other; left_scale_inv is [groups], too
  int64_t segment_rows;          // 0, or a multiple of kGroupRows: a group is as many rows, and group_of is not read.
                                 // The groups share right and both scales, as those of one group; v is of each
  FloatType dtype;               // kBFloat16 or kFloat16
  FloatType v_dtype;             // dtype, or kFloat32 to be rounded to it
  FloatType bias_dtype;          // any
  bool is_e5m2;                  // left
  bool untransposed;             // right, for fp8_grad_input without blocks; cols is then a multiple of 16
  bool in_blocks;                // each 1 × 128 of left and 128 × 128 of right has a scale
  bool splits;                   // add sums of 512 along depth in fp32: FP8 tensor cores keep fewer bits
  int tile_rows, tile_cols;      // any: 128 × 128; splits: 192 × 128; else, and in_blocks: 128 × 256, untransposed
                                 // 256 × 128
  int64_t multiprocessors;       // of the device
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(Fp8GemmParams& params, const Visit& visit) {
  visit(params.out, params.left, params.right, params.left_scale_inv, params.right_scale_inv, params.u, params.v);
  visit(params.bias, params.residual, params.dropped, params.group_of);
  each_address(params.dropout, visit);
}

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t. The gradient takes the weight untransposed.
void launch_fp8_linear_lora(const Fp8GemmParams& params, void* stream, int device);
void launch_fp8_grad_input(const Fp8GemmParams& params, void* stream, int device);
// With groups; in bf16, tiles of 128 rows, no bias, residual or mask. The gradient takes the weights untransposed.
void launch_grouped_linear_lora(const Fp8GemmParams& params, void* stream, int device);
void launch_grouped_grad_input(const Fp8GemmParams& params, void* stream, int device);
// With scales of blocks. right_scale_inv is [⌈cols / 128⌉, ⌈depth / 128⌉], for the gradient, which takes the weight
// transposed, [⌈depth / 128⌉, ⌈cols / 128⌉].
void launch_fp8_block_linear(const Fp8GemmParams& params, void* stream, int device);
void launch_fp8_block_grad_input(const Fp8GemmParams& params, void* stream, int device);

}  // namespace lorakernels
