// SPDX-License-Identifier: Apache-2.0
// quantize_lora_down for ranks up to 32, on GPUs with a tensor copy engine. A block stays in its slice of the columns
// and goes down the rows, 16 at a time. Each of its warps has 64 or 128 of the columns, with their part of A in
// registers, and has boxes of 16 rows × 64 columns copied for itself alone. The warps' sums of 16 rows, a tile, are
// added up one tile later, so that no warp waits for another.
#pragma once

#include "device/overlap.h"
#include "device/ptx/mbarrier.h"
#include "device/ptx/mma_sync.h"
#include "device/ptx/shared_memory.h"
#include "device/ptx/tma.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/quantize_lora_down/elements.h"

namespace lorakernels {
namespace {

template <int kRankTiles>
struct Boxes {
  static constexpr int kWarps = QuantizeLoraDownPlan::kWarpsOfBlock;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = QuantizeLoraDownPlan::columns_of_boxes(8 * kRankTiles);
  static constexpr int kBoxesOfTile = kColumns / kWarps / 64;  // of a warp
  static constexpr int kBoxBytes = 16 * 128;
  static constexpr int kStages = kRankTiles > 2 ? 4 : 6;  // boxes of a warp in shared memory, filled or being copied
  static constexpr int kSums = 16 * 8 * kRankTiles;       // of a warp
  static constexpr int kOffsetSums = kWarps * kStages * kBoxBytes;
  static constexpr int kOffsetFull = kOffsetSums + 2 * kWarps * kSums * 4;
  static constexpr int kOffsetSummed = kOffsetFull + kWarps * kStages * 8;
  static constexpr int kBytes = kOffsetSummed + 2 * 8;
};

// Thread (g, t) = (lane / 4, lane % 4) of a warp holds rows g and g + 8 of a box, columns 16 t … 16 t + 15, which are
// two draws. In this order they are operands of MMAs as well: a dot product may take its terms in any order that both
// operands share.
template <typename T, int kRankTiles, bool kDropout>
__global__ void __launch_bounds__(Boxes<kRankTiles>::kThreads, 2)
    quantize_lora_down_boxes_kernel(const __grid_constant__ CUtensorMap x_map,
                                    const __grid_constant__ QuantizeLoraDownParams params,
                                    const __grid_constant__ QuantizeLoraDownPlan plan) {
#if __CUDA_ARCH__ >= 900
  using Tile = Boxes<kRankTiles>;
  constexpr int kBoxes = Tile::kBoxesOfTile, kStages = Tile::kStages, kRank = 8 * kRankTiles;
  extern __shared__ __align__(1024) uint8_t shared_tiles[];
  const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t base = shared_address(shared_tiles), ring = base + warp * (kStages * Tile::kBoxBytes);
  const uint32_t full = base + Tile::kOffsetFull + warp * (kStages * 8), summed = base + Tile::kOffsetSummed;
  if (lane < kStages) init_barrier(full + 8 * lane, 1);
  if (threadIdx.x < 2) init_barrier(summed + 8 * threadIdx.x, Tile::kThreads);
  fence_barrier_init();
  if (threadIdx.x == 0) prefetch_map(x_map);
  begin_after_previous_kernel();
  __syncthreads();

  const uint32_t cols = static_cast<uint32_t>(params.cols), rows = static_cast<uint32_t>(params.rows);
  const uint32_t tiles = (rows + 15) / 16;
  const uint32_t warp_col = blockIdx.x * Tile::kColumns + warp * (kBoxes * 64);
  const uint32_t in_row = lane / 4, first_col = warp_col + lane % 4 * 16;
  uint32_t ahead_tile = blockIdx.y, ahead_box = 0;
  const auto bring = [&](int stage) {
    if (lane == 0 && ahead_tile < tiles) {
      arrive_and_expect(full + 8 * stage, Tile::kBoxBytes);
      copy_box(ring + stage * Tile::kBoxBytes, x_map, static_cast<int>(warp_col + ahead_box * 64),
               static_cast<int>(ahead_tile * 16), full + 8 * stage);
    }
    if (++ahead_box == kBoxes) ahead_box = 0, ahead_tile += gridDim.y;
  };
  for (int stage = 0; stage < kStages; ++stage) bring(stage);

  Quantizer<T> quantizer(params);
  const Dropper dropper = kDropout ? Dropper(params.dropout) : Dropper();
  constexpr int kTiles = kRankTiles > 0 ? kRankTiles : 1;
  uint4 a[2 * kBoxes * kTiles];  // [box][half of its 16 columns][tile of 8 ranks]
  if constexpr (kRankTiles > 0) {
    WordsOfA loaded[2 * kBoxes * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kBoxes * kTiles; ++i) {
      const int half = i / kTiles;
      loaded[i] = WordsOfA(params, 8 * (i % kTiles) + in_row, first_col + half / 2 * 64 + half % 2 * 8);
    }
#pragma unroll
    for (int i = 0; i < 2 * kBoxes * kTiles; ++i) a[i] = loaded[i].template rounded<T>(params);
  }
  DrawsOfColumn columns[kBoxes][2];
  if constexpr (kDropout) {
#pragma unroll
    for (int i = 0; i < 2 * kBoxes; ++i) {
      columns[i / 2][i % 2] = dropper.of_column(first_col + i / 2 * 64 + i % 2 * 8);
    }
  }

  // Adds up the warps' sums of the block's count-th tile, when all are there. A thread does one of 16 × 16 ranks at a
  // time.
  const auto add_up = [&](uint32_t tile, uint32_t count) {
    if constexpr (kRankTiles > 0) {
      wait_for(summed + count % 2 * 8, count / 2 % 2);
      const float* const sums =
          reinterpret_cast<const float*>(shared_tiles + Tile::kOffsetSums) + count % 2 * (Tile::kWarps * Tile::kSums);
      const uint32_t i = threadIdx.x, r = i / 128 * 8 + i / 4 % 4 * 2 + i % 2;
      const uint32_t row = tile * 16 + i / 16 % 8 + i / 2 % 2 * 8;
      float* const to =
          params.workspace + plan.offset_sums + (static_cast<int64_t>(blockIdx.x) * rows + row) * kRank + r;
#pragma unroll
      for (int n = 0; n < kRankTiles / 2; ++n) {
        float sum = 0.0f;
#pragma unroll
        for (int each = 0; each < Tile::kWarps; ++each) sum += sums[each * Tile::kSums + n * Tile::kThreads + i];
        if (row < rows) to[n * 16] = sum;
      }
    }
  };

  const uint32_t source =
      in_row * 128 + ((lane % 4 * 2 ^ in_row) << 4);  // of this thread's elements in a box, whose chunks are swizzled
  uint32_t count = 0;
  int stage = 0, round = 0;
  for (uint32_t tile = blockIdx.y; tile < tiles; tile += gridDim.y, ++count) {
    const uint32_t row = tile * 16 + in_row;
    uint8_t* const target = params.x8 + (static_cast<int64_t>(row) * cols + first_col);
    const bool has_row[2] = {quantizer.known && row < rows, quantizer.known && row + 8 < rows};
    uint4 of_row[2];
    if constexpr (kDropout) of_row[0] = dropper.of_row(row), of_row[1] = dropper.of_row(row + 8);
    float sum[kTiles][4] = {};
    ScalesOfRows<T> scales(quantizer.scale);
    if constexpr (kBoxes == 2) {
      if (params.in_blocks) {
        const int next = stage + 1;  // of an even number of stages, and no round ends in between
        wait_for(full + 8 * stage, round);
        wait_for(full + 8 * next, round);
        const uint8_t* const here = shared_tiles + (warp * kStages + stage) * Tile::kBoxBytes;
        const bool exist[2] = {has_row[0] && warp_col < cols, has_row[1] && warp_col < cols};
        float* const inverse = params.scale_inv + static_cast<int64_t>(warp_col / 128) * rows + row;
        scales.find(params, exist, inverse, [&](int second, int i) {
          const uint32_t chunk = (i % 2 == 0 ? source : source ^ 16) + second * (8 * 128) + i / 2 * Tile::kBoxBytes;
          return *reinterpret_cast<const uint4*>(here + chunk);
        });
      }
    }
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      wait_for(full + 8 * stage, round);
      const uint8_t* const here = shared_tiles + (warp * kStages + stage) * Tile::kBoxBytes;
      uint4 words[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i][0] = *reinterpret_cast<const uint4*>(here + source + i * (8 * 128));
        words[i][1] = *reinterpret_cast<const uint4*>(here + (source ^ 16) + i * (8 * 128));
      }
      PhiloxDraw draws[4];
      if constexpr (kDropout) Dropper::begin(draws, of_row, columns[box]);
      const uint32_t col = first_col + box * 64;
      const bool exist[2] = {has_row[0] && col < cols, has_row[1] && col < cols};
      take<T, kDropout>(quantizer, dropper, words, draws, exist, target + box * 64, 8 * cols, scales.scale);
      if constexpr (kDropout) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = dropper.survivors(words[i / 2][i % 2], draws[i]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4 &top = words[0][c], &bottom = words[1][c];
#pragma unroll
        for (int n = 0; n < kRankTiles; ++n) {
          const uint4& ranks = a[(2 * box + c) * kRankTiles + n];
          mma<T>(sum[n], top.x, bottom.x, top.y, bottom.y, ranks.x, ranks.y);
        }
#pragma unroll
        for (int n = 0; n < kRankTiles; ++n) {
          const uint4& ranks = a[(2 * box + c) * kRankTiles + n];
          mma<T>(sum[n], top.z, bottom.z, top.w, bottom.w, ranks.z, ranks.w);
        }
      }
      __syncwarp();
      bring(stage);
      if (++stage == kStages) stage = 0, round ^= 1;
    }
    if constexpr (kRankTiles > 0) {
      if (count > 0)
        add_up(tile - gridDim.y, count - 1);  // before the stores below, for then no warp reads what they replace
      float4* const mine = reinterpret_cast<float4*>(shared_tiles + Tile::kOffsetSums) +
                           (count % 2 * Tile::kWarps + warp) * (Tile::kSums / 4) + lane;
#pragma unroll
      for (int n = 0; n < kRankTiles; ++n) mine[n * 32] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
      arrive(summed + count % 2 * 8);
    }
  }
  if (count > 0) add_up(blockIdx.y + (count - 1) * gridDim.y, count - 1);
  __syncthreads();
  quantizer.leave(params, reinterpret_cast<uint32_t*>(shared_tiles));
#endif
}

template <typename T, int kRankTiles, bool kDropout>
void launch_boxes(const QuantizeLoraDownParams& params, const QuantizeLoraDownPlan& plan, cudaStream_t stream) {
  using Tile = Boxes<kRankTiles>;
  const auto kernel = quantize_lora_down_boxes_kernel<T, kRankTiles, kDropout>;
  const CUtensorMap x_map = tensor_map<T>(params.x, params.rows, params.cols, 16);
  const dim3 blocks(static_cast<unsigned>(plan.slices), static_cast<unsigned>(plan.row_blocks));
  launch_kernel(kernel, blocks, Tile::kThreads, Tile::kBytes, stream, true, x_map, params, plan);
}

}  // namespace
}  // namespace lorakernels
