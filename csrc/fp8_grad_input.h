// SPDX-License-Identifier: Apache-2.0
// dx = dy_scale_inv weight_scale_inv · dy8 W8 + factor · keep ⊙ (ds A), rounded once; keep is drawn again by philox.h's
// rule. Hopper's FP8 tensor cores read operands only whose rows run along the contraction, so W8 comes transposed. For
// sm_90a.
#pragma once

#include <cstdint>

#include "dropout.h"
#include "float_type.h"

namespace lorakernels {

struct Fp8GradInputParams {
  void* dx;                       // [rows, cols] of dtype, 16-byte aligned
  const uint8_t* dy8;             // [rows, depth] e5m2 or e4m3, 16-byte aligned
  const uint8_t* weight_t;        // [cols, depth] e4m3, 16-byte aligned
  const float* dy_scale_inv;      // [1], what an element of dy8 is multiplied by
  const float* weight_scale_inv;  // [1]
  const void* ds;                 // [rows, ds_stride] of dtype, 16-byte aligned; null with rank 0
  const void* A;                  // [rank, cols] of dtype, or fp32 to be rounded to it, 16-byte aligned
  int64_t rows;                   // below 2^31 - 256
  int64_t cols;                   // a multiple of 8, below 2^31 - 256
  int64_t depth;                  // a multiple of 16, below 2^31 - 256
  int64_t rank;                   // 0: no second product
  int64_t ds_stride;              // elements, a multiple of 8, at least rank; those behind rank are zeros
  float factor;                   // 1 / (1 - p), exactly
  DropoutParams dropout;          // first_col a multiple of 8
  const uint32_t* dropped;        // [rows, dropped_words(cols)], the mask; null: draw it
  FloatType dtype;                // of dx and ds: kBFloat16 or kFloat16
  bool a_is_fp32;                 //
  bool is_e5m2;                   // dy8
  bool splits;                    // sums of 128 along depth are added in fp32: the FP8 tensor cores keep fewer bits
  bool large_tiles;               // 256 × 128 or 128 × 256 instead of 128 × 128
  int64_t multiprocessors;        // of the device
};

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_fp8_grad_input(const Fp8GradInputParams& params, void* stream, int device);

}  // namespace lorakernels
