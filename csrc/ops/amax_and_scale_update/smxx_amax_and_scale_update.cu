// SPDX-License-Identifier: Apache-2.0
#include "host/cuda_check.h"
#include "ops/amax_and_scale_update/params.h"

namespace lorakernels {
namespace {

constexpr int kColumns = 32;
constexpr int kThreadRows = 32;
constexpr int kRowsPerThread = 16;  // loaded at a time
constexpr int kTileRows = kThreadRows * kRowsPerThread;

__device__ bool gate_is_open(const AmaxAndScaleUpdateParams& params) {
  if (!params.gated) return true;
  bool open = false;
  const int thread = threadIdx.y * kColumns + threadIdx.x;
  for (int64_t i = thread; i < params.n; i += kColumns * kThreadRows) open |= opens_gate(params.current[params.n + i]);
  return __syncthreads_or(open);
}

// blockIdx.y is the direction. A warp has 32 neighbouring columns of a row. The history is moved up by one row, tile by
// tile. All rows of a tile are read before any of them is written, and later tiles read only rows below it.
__global__ void __launch_bounds__(kColumns* kThreadRows)
    amax_and_scale_update_kernel(const AmaxAndScaleUpdateParams params) {
  __shared__ float partial[kThreadRows][kColumns + 1];
  if (!gate_is_open(params)) return;

  const bool is_backward = blockIdx.y == 1;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const bool inside = column < params.n;
  float* const history = (is_backward ? params.state[1] : params.state[0]) + column;
  const float* const amaxes = params.current == nullptr ? history : params.current + blockIdx.y * params.n + column;
  const int64_t last = params.history_len - 1;
  const float current = inside ? *amaxes : 0.0f;
  const bool active = inside && current != 0.0f;
  float amax = 0.0f;

  for (int64_t base = 0; base < last; base += kTileRows) {
    float entry[kRowsPerThread];
#pragma unroll
    for (int j = 0; j < kRowsPerThread; ++j) {
      const int64_t row = base + j * kThreadRows + threadIdx.y;
      entry[j] = active && row < last ? history[(row + 1) * params.n] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kRowsPerThread; ++j) {
      const int64_t row = base + j * kThreadRows + threadIdx.y;
      amax = max_of_finite(amax, entry[j]);
      if (active && row < last && row > 0) history[row * params.n] = entry[j];
    }
  }

  partial[threadIdx.y][threadIdx.x] = amax;
  __syncthreads();
  if (threadIdx.y != 0 || !active) return;
  for (int row = 1; row < kThreadRows; ++row) amax = max_of_finite(amax, partial[row][threadIdx.x]);
  amax = params.most_recent ? current : max_of_finite(amax, current);

  history[last * params.n] = current;
  history[0] = 0.0f;
  float& scale = history[params.history_len * params.n];
  scale = updated_scale(scale, current, amax, is_backward ? params.scaled_fp8_max[1] : params.scaled_fp8_max[0]);
}

}  // namespace

void launch_amax_and_scale_update(const AmaxAndScaleUpdateParams& params, void* stream, int device) {
  if (params.n == 0) return;
  const DeviceGuard guard(device);
  const dim3 block(kColumns, kThreadRows);
  const dim3 grid(static_cast<unsigned>((params.n + kColumns - 1) / kColumns), 2);
  amax_and_scale_update_kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(params);
  LORAKERNELS_CHECK_LAUNCH("amax_and_scale_update");
}

}  // namespace lorakernels
