// SPDX-License-Identifier: Apache-2.0
// out = residual + mask ⊙ (x + bias) / (1 − p), and its backward
//   dx = mask ⊙ dout / (1 − p)      dbias = Σ_rows dx
// with the mask of device/philox.h, which backward draws again. Arithmetic is in fp32, with one rounding at the store;
// dbias is summed in an order that depends on BiasDropoutAddGrid alone. Every tensor is [rows, cols], row-major without
// gaps, of one dtype; any address that the dtype allows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/dropout.h"
#include "device/float_type.h"

namespace lorakernels {

struct BiasDropoutAddParams {
  void* out;             // may be x or residual
  const void* x;         // [rows, cols]
  const void* bias;      // [cols] or null
  const void* residual;  // or null
  int64_t rows;          // elements, below 2^31
  int64_t cols;          // elements
  FloatType dtype;       // of out, x, residual
  FloatType bias_dtype;  // dtype, or kFloat32
  DropoutParams dropout;
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(BiasDropoutAddParams& params, const Visit& visit) {
  visit(params.out, params.x, params.bias, params.residual);
  each_address(params.dropout, visit);
}

struct BiasDropoutAddBackwardParams {
  void* dx;              // not written if threshold is 0: dx is dout then
  void* dbias;           // [cols] or null
  float* partial;        // [grid_y of BiasDropoutAddGrid, cols]; null without dbias
  const void* dout;      // [rows, cols]
  int64_t rows;          // elements, below 2^31
  int64_t cols;          // elements
  FloatType dtype;       // of dx, dout
  FloatType bias_dtype;  // dtype, or kFloat32
  DropoutParams dropout;
};

// Visits what a LaunchList replaces (host/launch_list.h).
template <typename Visit>
void each_address(BiasDropoutAddBackwardParams& params, const Visit& visit) {
  visit(params.dx, params.dbias, params.partial, params.dout);
  each_address(params.dropout, visit);
}

// Threads [x, y] of a block walk [column groups, rows]. The grid follows from the shape and the number of the GPU's
// multiprocessors alone, and so does the order in which dbias is summed. Each block keeps partial sums of dbias, so few
// blocks keep few of them. Where there are no sums to keep, more blocks balance better (an H200, 8192 × 8192 bf16: 100
// against 104 µs), down to a few rows a thread.
struct BiasDropoutAddGrid {
  static constexpr int kThreads = 256;
  static constexpr int64_t kBlocks = 64;  // for each multiprocessor
  static constexpr int64_t kBlocksThatSum = 4;
  static constexpr int64_t kRowsPerThread = 4;

  int block_x, block_y;
  int64_t grid_x, grid_y;

  BiasDropoutAddGrid(int64_t rows, int64_t cols, uint32_t first_col, bool sums, int64_t multiprocessors) {
    const int64_t groups = std::max<int64_t>(1, dropout_groups(first_col, cols));
    block_x = 32;
    while (block_x > 1 && block_x / 2 >= groups) block_x /= 2;
    block_y = kThreads / block_x;
    grid_x = (groups + block_x - 1) / block_x;
    const int64_t blocks = multiprocessors * (sums ? kBlocksThatSum : kBlocks);
    const int64_t rows_per_block = block_y * kRowsPerThread;
    grid_y = std::max<int64_t>(1, std::min((rows + rows_per_block - 1) / rows_per_block, blocks / grid_x));
  }
};

// device: CUDA ordinal, or -1 for the current one. stream: a cudaStream_t.
void launch_bias_dropout_add(const BiasDropoutAddParams& params, void* stream, int device);
void launch_bias_dropout_add_backward(const BiasDropoutAddBackwardParams& params, void* stream, int device);

}  // namespace lorakernels
