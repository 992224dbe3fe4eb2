// SPDX-License-Identifier: Apache-2.0
// FP8 products that already contain the adapter's, rounded once:
//
//   fp8_linear_lora   y  = x8 W8ᵀ + factor · s Bᵀ + bias + residual        u = s,  v = Bᵀ, stored as B
//   fp8_grad_input    dx = dy8 W8 + factor · keep ⊙ (ds A)                 u = ds, v = A
//
// with the scales of the FP8 operands. Hopper's FP8 tensor cores read operands only whose rows run along the
// contraction: W8 as it lies for the first, transposed for the second, which takes it transposed or, turned, as it lies
// (sm90_untransposed.h). keep is drawn again by philox.h's rule. For sm_90a.
#pragma once

#include <cstdint>

#include "device/dropout.h"
#include "host/float_type.h"

namespace lorakernels {

struct Fp8GemmLimits {
  static constexpr int64_t kColsMultiple = 8;  // also of first_col and u_stride
  static constexpr int64_t kUntransposedColsMultiple = 16;
  static constexpr int64_t kDepthMultiple = 16;
};

struct Fp8GemmParams {
  void* out;                     // [rows, cols] of dtype, 16-byte aligned
  const uint8_t* left;           // [rows, depth] e4m3, or e5m2 for fp8_grad_input, 16-byte aligned
  const uint8_t* right;          // [cols, depth] e4m3, 16-byte aligned; turned [depth, cols]
  const float* left_scale_inv;   // [1], what an element of left is multiplied by
  const float* right_scale_inv;  // [1], or [cols] for fp8_linear_lora: one for each row of right
  bool by_column;                // right_scale_inv is [cols]
  const void* u;                 // [rows, u_stride] of dtype, 16-byte aligned; null with rank 0
  const void* v;                 // [rank, cols], or [cols, u_stride] for fp8_linear_lora; 16-byte aligned
  const void* bias;              // [cols]; null: none. fp8_linear_lora only, as
  const void* residual;          // [rows, cols] of dtype, 16-byte aligned; null: none
  int64_t rows;                  // below 2^31 - 256
  int64_t cols;                  // a multiple of 8, below 2^31 - 256
  int64_t depth;                 // a positive multiple of 16, below 2^31 - 256
  int64_t rank;                  // 0: no second product
  int64_t u_stride;              // elements, a multiple of 8, at least rank; those behind rank are zeros
  float factor;                  //
  DropoutParams dropout;         // fp8_grad_input only; first_col a multiple of 8
  const uint32_t* dropped;       // [rows, dropped_words(cols)], the mask; null: draw it
  FloatType dtype;               // kBFloat16 or kFloat16
  FloatType v_dtype;             // dtype, or kFloat32 to be rounded to it
  FloatType bias_dtype;          // any
  bool is_e5m2;                  // left
  bool turned;                   // fp8_grad_input that splits only; cols is a multiple of 16 then
  bool splits;                   // sums of 128 along depth are added in fp32: the FP8 tensor cores keep fewer bits
  int tile_rows, tile_cols;      // 128 × 128; splitting 192 × 128 or, not turned, 256 × 128; otherwise 128 × 256
  int64_t multiprocessors;       // of the device
};

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_fp8_linear_lora(const Fp8GemmParams& params, void* stream, int device);
void launch_fp8_grad_input(const Fp8GemmParams& params, void* stream, int device);         // not turned
void launch_fp8_grad_input_turned(const Fp8GemmParams& params, void* stream, int device);  // turned

}  // namespace lorakernels
