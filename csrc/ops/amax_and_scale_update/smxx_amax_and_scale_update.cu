// SPDX-License-Identifier: Apache-2.0
#include "device/overlap.h"
#include "host/launch.h"
#include "ops/amax_and_scale_update/params.h"

namespace lorakernels {
namespace {

constexpr int kColumns = 8;
constexpr int kThreadRows = 128;
constexpr int kRowsPerThread = 8;  // loaded at a time: with this a history of 1024 is one tile
constexpr int kTileRows = kThreadRows * kRowsPerThread;

__device__ bool gate_is_open(const AmaxAndScaleUpdateParams& params) {
  if (!params.gated) return true;
  bool open = false;
  const int thread = threadIdx.y * kColumns + threadIdx.x;
  for (int64_t i = thread; i < params.n; i += kColumns * kThreadRows) open |= opens_gate(params.current[params.n + i]);
  return __syncthreads_or(open);
}

// The largest `mine` of the block in each column.
__device__ float max_of_column(float mine) {
  constexpr int kParts = kThreadRows / 32;
  __shared__ float partial[kThreadRows][kColumns + 1], largest[kParts][kColumns];
  partial[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  const int thread = threadIdx.y * kColumns + threadIdx.x, warp = thread / 32, lane = thread % 32;
  float amax = partial[warp % kParts * 32 + lane][warp / kParts];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  if (lane == 0) largest[warp % kParts][warp / kParts] = amax;
  __syncthreads();
  amax = largest[0][threadIdx.x];
#pragma unroll
  for (int part = 1; part < kParts; ++part) amax = fmaxf(amax, largest[part][threadIdx.x]);
  return amax;
}

// blockIdx.y is the direction. A quarter of a warp has 8 neighbouring columns of a row. The history is moved up by one
// row, tile by tile. All rows of a tile are read before any of them is written, and later tiles read only rows below
// it. A column without a new amax is read for nothing, so that no load waits for another.
__global__ void __launch_bounds__(kColumns* kThreadRows, 1)
    amax_and_scale_update_kernel(const AmaxAndScaleUpdateParams params) {
  begin_after_previous_kernel();
  if (!gate_is_open(params)) return;

  const bool is_backward = blockIdx.y == 1;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const bool inside = column < params.n;
  float* const history = (is_backward ? params.state[1] : params.state[0]) + column;
  const float* const amaxes = params.current == nullptr ? history : params.current + blockIdx.y * params.n + column;
  const int64_t last = params.history_len - 1;
  const float current = inside ? *amaxes : 0.0f;
  const float scale = inside ? history[params.history_len * params.n] : 0.0f;
  const bool active = inside && current != 0.0f;
  float amax = 0.0f;

  const int64_t step = kThreadRows * params.n;
  float* to = history + threadIdx.y * params.n;
  for (int64_t row = threadIdx.y; row - threadIdx.y < last; row += kTileRows, to += kTileRows * params.n) {
    float entry[kRowsPerThread];
#pragma unroll
    for (int j = 0; j < kRowsPerThread; ++j) {
      entry[j] = inside && row + j * kThreadRows < last ? to[j * step + params.n] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kRowsPerThread; ++j) {
      amax = max_of_finite(amax, entry[j]);
      if (active && row + j * kThreadRows < last && row + j > 0) to[j * step] = entry[j];
    }
  }

  amax = max_of_column(amax);
  if (threadIdx.y != 0 || !active) return;
  amax = params.most_recent ? current : max_of_finite(amax, current);
  history[last * params.n] = current;
  history[0] = 0.0f;
  history[params.history_len * params.n] =
      updated_scale(scale, current, amax, is_backward ? params.scaled_fp8_max[1] : params.scaled_fp8_max[0]);
}

}  // namespace

void launch_amax_and_scale_update(const AmaxAndScaleUpdateParams& params, void* stream, int device) {
  if (params.n == 0) return;
  const DeviceGuard guard(device);
  const dim3 block(kColumns, kThreadRows);
  const dim3 grid(static_cast<unsigned>((params.n + kColumns - 1) / kColumns), 2);
  launch_kernel(amax_and_scale_update_kernel, grid, block, 0, static_cast<cudaStream_t>(stream), true, params);
}

}  // namespace lorakernels
