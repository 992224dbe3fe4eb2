// SPDX-License-Identifier: Apache-2.0
// In one read of x [rows, cols]:
//   x8 = sat(x · scale)      amax = max |x|      s = D(x) Aᵀ,  D(x) = mask ⊙ x / (1 − p)
// x8 is e4m3. Products run on the tensor cores in x's dtype with fp32 accumulation and are summed in an order that
// depends on the shape alone; the factor 1 / (1 − p) is applied to the sum, which is rounded once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amax.h"
#include "dropout.h"

namespace lorakernels {

struct QuantizeLoraDownParams {
  uint8_t* x8;         // [rows, cols] e4m3, or null: x is not quantized
  float* scale_inv;    // [1] 1 / scale, with x8
  float* amax;         // raised to max |x|, NaN above inf; or null
  void* s;             // [rows, rank] of dtype; null with rank 0
  float* partial;      // [slices, rows, rank_columns] of QuantizeLoraDownGrid; null with rank 0
  const void* x;       // [rows, cols], row-major without gaps, 16-byte aligned
  const void* lora_A;  // [rank, cols] of a_dtype, 16-byte aligned; null with rank 0
  ScaleSource scale;   // with x8
  int64_t rows;        // elements, below 2^31
  int64_t cols;        // elements, a multiple of 8, below 2^24
  int64_t rank;        // 0 to 128
  FloatType dtype;     // kBFloat16 or kFloat16
  FloatType a_dtype;   // dtype, or kFloat32
  DropoutParams dropout;
};

// A warp takes 16 rows of a slice of the columns, whose part of A its block keeps in shared memory. Slices are as wide
// as that memory allows, but narrow enough to give every warp of 132 multiprocessors a part.
struct QuantizeLoraDownGrid {
  static constexpr int64_t kWarps = 8;
  static constexpr int64_t kStepColumns = 64;

  int64_t rank_columns, slice, slices, tiles, blocks_of_slice;

  QuantizeLoraDownGrid(int64_t rows, int64_t cols, int64_t rank) {
    rank_columns = rank == 0 ? 0 : 16;
    while (rank_columns < rank) rank_columns *= 2;
    const int64_t blocks = rank_columns > 32 ? 132 : 264;  // their shared memory and registers leave room for 1 or 2
    slice = rank_columns == 32 || rank_columns == 128 ? 512 : 1024;
    tiles = (rows + 15) / 16;
    while (slice > 256 && tiles * ((cols + slice - 1) / slice) < kWarps * blocks) slice /= 2;
    slices = std::max<int64_t>(1, (cols + slice - 1) / slice);
    blocks_of_slice = std::max<int64_t>(1, std::min((tiles + kWarps - 1) / kWarps, blocks / slices));
  }
};

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_quantize_lora_down(const QuantizeLoraDownParams& params, void* stream, int device);

}  // namespace lorakernels
