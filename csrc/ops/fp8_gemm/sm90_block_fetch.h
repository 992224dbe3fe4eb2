// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the warp of sm90_kernel.h that fills the ring with operands in blocks, and with their scales.
#pragma once

#include "device/ptx/cp_async.h"
#include "ops/fp8_gemm/sm90_tiles.h"

namespace lorakernels {
namespace {

// By a warp, for kGradInputUntransposed. Beside a step's operands it leaves the factors of the tile's rows: dy's scales
// times the weight's. A lane copies the scales of rows lane + 32 i, and the weight's, some steps ahead, as L2 takes
// longer for them than the tensor cores for a step.
template <typename Tile, int kMultiple>
struct ScaledOperands {
  static constexpr int kEach = Tile::kRows / 32, kAhead = Tile::kAhead, kSteps = Tile::kScaledSteps;
  const Fp8GemmParams& params;
  uint32_t base;
  int lane = threadIdx.x % 32;
  uint32_t rows = static_cast<uint32_t>(params.rows), depth_steps = count_steps<1>(params);
  uint32_t blocks = Tiles<Tile>::count(params.cols, kBlockCols);

  __device__ ScaledOperands(const Fp8GemmParams& params, uint32_t base) : params(params), base(base) {}

  // Where a lane's first scale of a step is copied to; the others lie 32 floats apart, the weight's last.
  __device__ uint32_t scales_of(uint32_t step) const {
    return base + Tile::kOffsetAhead + step % kAhead * Tile::kAheadBytes + lane * 4;
  }

  // Starts to copy a step's scales; zeros beyond the depth. What lies beyond the rows is not stored.
  __device__ void copy_scales(uint32_t step, uint32_t row, uint32_t block) const {
    const bool exists = step < depth_steps;
    const uint32_t at = exists ? step : 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t from = at * rows + min(row + lane + i * 32u, rows - 1);
      copy_async<4>(scales_of(step) + i * 128, params.left_scale_inv + from, exists);
    }
    copy_async<4>(scales_of(step) + kEach * 128, params.right_scale_inv + at * blocks + block, exists);
    commit_copies();
  }

  // A thread that multiplies has rows 8 j + {0, 1}, beyond the 2 (lane % 4) of its first. For an even j, their factors
  // and those of 8 (j + 1) + {0, 1} are neighbours.
  static __device__ int place_of(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

  __device__ void leave_factors(uint32_t step, uint32_t half) const {
    const uint32_t from = scales_of(step);
    const uint32_t to = base + Tile::kOffsetFactors + (half * kSteps + step % kSteps) * Tile::kFactorsBytes;
    const float scale = load_float(from + kEach * 128);
#pragma unroll
    for (int i = 0; i < kEach; ++i) store_float(to + place_of(lane + i * 32) * 4, load_float(from + i * 128) * scale);
  }

  __device__ void copy_tiles(const CUtensorMap& left, const CUtensorMap& right) const {
    TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
    const uint32_t steps = count_steps<kMultiple>(params);
    uint32_t time = 0;  // how many times kSteps steps of factors were left
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      const int row = tiles.row(), col = tiles.col();
      wait_for_all_copies();
#pragma unroll 1
      for (uint32_t step = 0; step < kAhead; ++step) copy_scales(step, row, col / kBlockCols);
#pragma unroll 1
      for (uint32_t step = 0; step < steps; ++step, ring.advance()) {
        wait_for(ring.empty(), ring.round ^ 1);
        if (lane == 0) {
          arrive_and_expect(ring.full(), Tile::kStageBytes);
          copy_box(ring.tile(), left, step * kStepDepth, row, ring.full());
          copy_box(ring.tile() + Tile::kBytesLeft, right, col, step * kStepDepth, ring.full());
        }
        __syncwarp();
        if (step % kSteps == 0) wait_for(base + Tile::kOffsetRead + time % 2 * 8, time / 2 % 2 ^ 1);
        wait_for_copies<kAhead - 1>();
        leave_factors(step, time % 2);
        arrive(ring.full());
        copy_scales(step + kAhead, row, col / kBlockCols);
        time += step % kSteps == kSteps - 1;
      }
    }
    wait_for_all_copies();
  }
};

}  // namespace
}  // namespace lorakernels
