// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "device/draw_mask.h"
#include "host/cuda_check.h"
#include "host/device.h"
#include "ops/dropout_mask/params.h"

namespace lorakernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 16;  // for each multiprocessor

// A thread makes the 8 columns of a draw, and writes them at once if rows are 8-byte aligned.
__global__ void __launch_bounds__(kThreads) dropout_mask_kernel(const DropoutMaskParams params) {
  const uint64_t key = static_cast<uint64_t>(params.slot[0]);
  const uint64_t offset = static_cast<uint64_t>(params.slot[1]);
  const int64_t groups = dropout_groups(params.first_col, params.cols);
  const uint32_t first_lane = params.first_col % kDropoutLanesPerDraw;
  const bool aligned = params.cols % kDropoutLanesPerDraw == 0 && first_lane == 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < params.rows * groups; i += step) {
    const int64_t row = i / groups, group = i % groups;
    const PhiloxDraw draw =
        dropout_draw(params.mapped(static_cast<uint32_t>(row)),
                     params.first_col / kDropoutLanesPerDraw + static_cast<uint32_t>(group), key, offset, params.site);
    uint64_t bytes = 0;
#pragma unroll
    for (uint32_t lane = 0; lane < kDropoutLanesPerDraw; ++lane) {
      bytes |= static_cast<uint64_t>(dropout_keeps(draw, lane, params.threshold)) << (8 * lane);
    }
    const int64_t first = group * kDropoutLanesPerDraw - first_lane;
    uint8_t* const out = params.out + row * params.cols + first;
    if (aligned) {
      *reinterpret_cast<uint64_t*>(out) = bytes;
    } else {
      for (int64_t lane = 0; lane < kDropoutLanesPerDraw; ++lane) {
        if (first + lane >= 0 && first + lane < params.cols) out[lane] = static_cast<uint8_t>(bytes >> (8 * lane));
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 5)
    dropped_bits_kernel(const DropoutParams dropout, uint32_t* dropped, int64_t rows, int64_t cols) {
  __shared__ uint32_t drawn;
  if (threadIdx.x == 0) drawn = 0;
  __syncthreads();
  draw_mask(dropout, dropped, rows, cols, &drawn);
}

unsigned blocks_for(int64_t wanted) {
  return static_cast<unsigned>(std::min(wanted, kMostBlocks * current_device().multiprocessors));
}

}  // namespace

void launch_dropped_bits(const DroppedBitsParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const unsigned blocks = blocks_for((params.rows + kMostRowsOfUnit - 1) / kMostRowsOfUnit);
  dropped_bits_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params.dropout, params.dropped,
                                                                                  params.rows, params.cols);
  LORAKERNELS_CHECK_LAUNCH("dropped_bits");
}

void launch_dropout_mask(const DropoutMaskParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const int64_t draws = params.rows * dropout_groups(params.first_col, params.cols);
  const DeviceGuard guard(device);
  const unsigned blocks = blocks_for((draws + kThreads - 1) / kThreads);
  dropout_mask_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  LORAKERNELS_CHECK_LAUNCH("dropout_mask");
}

}  // namespace lorakernels
