// SPDX-License-Identifier: Apache-2.0
// quantize_lora_down for high ranks on Hopper, by wgmma. A block has a panel of 128 or 192 rows, 64 for each warpgroup.
// It goes along its slice of the columns, 64 at a time. TMA copies these columns of x and of A.
#pragma once

#include "device/overlap.h"
#include "device/ptx/mbarrier.h"
#include "device/ptx/shared_memory.h"
#include "device/ptx/tma.h"
#include "device/ptx/wgmma.h"
#include "device/tile_ring.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/quantize_lora_down/elements.h"

namespace lorakernels {
namespace {

template <int kRank>
struct Panel {
  static constexpr int kRows = QuantizeLoraDownPlan::rows_of_panel(kRank);
  static constexpr int kThreads = 2 * kRows;
  static constexpr int kBlocksOfProcessor = kRank > 64 ? 1 : 2;
  static constexpr int kBytesOfX = kRows * 128;
  static constexpr int kStageBytes = kBytesOfX + kRank * 128;
  static constexpr int kStages = kRank == 128 ? 5 : 4;
  static constexpr int kOffsetBarriers = kStages * kStageBytes;  // first the full ones, then the empty ones
  static constexpr int kBytes = kOffsetBarriers + 2 * kStages * 8;
};

// Rounds A to T, as [padded rank, columns padded to 64], and puts each 64 columns into the order in which they are
// multiplied. Thread t of four holds columns 16 t … 16 t + 15 and gives four of them, 4 k … 4 k + 3, to the k-th
// product.
template <typename T>
__global__ void __launch_bounds__(256)
    arrange_A_kernel(const QuantizeLoraDownParams params, uint32_t padded_rank, uint32_t* arranged) {
  begin_after_previous_kernel();
  const uint32_t groups = static_cast<uint32_t>(QuantizeLoraDownPlan::arranged_columns(params.cols)) / 8;
  const uint32_t i = blockIdx.x * 256 + threadIdx.x;
  if (i >= groups * padded_rank) return;
  const uint32_t r = i / groups, group = i % groups;
  const uint4 words = WordsOfA(params, r, group * 8).rounded<T>(params);
  uint32_t* const to = arranged + static_cast<int64_t>(r * groups + group / 8 * 8) * 4 + group % 2 * 16 + group % 8 / 2;
  to[0] = words.x, to[4] = words.y, to[8] = words.z, to[12] = words.w;
}

template <typename T, int kRank, bool kDropout>
__global__ void __launch_bounds__(Panel<kRank>::kThreads, Panel<kRank>::kBlocksOfProcessor)
    quantize_lora_down_panels_kernel(const __grid_constant__ CUtensorMap x_map,
                                     const __grid_constant__ CUtensorMap a_map,
                                     const __grid_constant__ QuantizeLoraDownParams params,
                                     const __grid_constant__ QuantizeLoraDownPlan plan) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = Panel<kRank>;
  using Rows = SwizzledRows<128>;
  extern __shared__ __align__(1024) uint8_t shared_tiles[];
  const uint32_t base = shared_address(shared_tiles), lane = threadIdx.x % 32;
  TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
  if (threadIdx.x == 0) {
    for (auto each = ring; each.round == 0; each.advance()) {
      init_barrier(each.full(), 1);
      init_barrier(each.empty(), Tile::kThreads / 32);
    }
    fence_barrier_init();
  }
  begin_after_previous_kernel();
  __syncthreads();

  const int rows = static_cast<int>(params.rows), cols = static_cast<int>(params.cols);
  const int slices = static_cast<int>(plan.slices), slice = blockIdx.x % slices;
  const int first_row = static_cast<int>(blockIdx.x / slices) * Tile::kRows;
  const int64_t steps = (cols + 63) / 64;
  const int end = static_cast<int>(steps * (slice + 1) / slices);
  int step = static_cast<int>(steps * slice / slices);
  const auto bring = [&](int what, const auto& to) {
    if (what >= end || threadIdx.x != 0) return;
    wait_for(to.empty(), to.round ^ 1);
    arrive_and_expect(to.full(), Tile::kStageBytes);
    copy_box(to.tile(), x_map, what * 64, first_row, to.full());
    copy_box(to.tile() + Tile::kBytesOfX, a_map, what * 64, 0, to.full());
  };
  for (auto to = ring; to.stage < Tile::kStages - 1; to.advance()) bring(step + to.stage, to);
  __syncwarp();

  Quantizer<T> quantizer(params);
  const int in_panel = threadIdx.x / 32 * 16 + lane / 4, row = first_row + in_panel;
  const Dropper dropper = kDropout ? Dropper(params.dropout) : Dropper();
  uint4 of_row[2];
  if constexpr (kDropout) of_row[0] = dropper.of_row(row), of_row[1] = dropper.of_row(row + 8);
  const uint32_t source = Rows::offset(in_panel, lane % 4 * 2);
  uint8_t* const target = params.x8 + (static_cast<int64_t>(row) * cols + lane % 4 * 16);
  const bool has_row[2] = {quantizer.known && row < rows, quantizer.known && row + 8 < rows};

  const float scales[2] = {quantizer.scale, quantizer.scale};
  float sum[kRank / 2] = {};
  for (bool is_first = true; step < end; ++step, is_first = false) {
    const int col = step * 64 + static_cast<int>(lane) % 4 * 16;
    wait_for(ring.full(), ring.round);
    wgmma_wait();        // the products of the step before have read `words` and A
    auto before = ring;  // the stage of the step before, which is filled next
    before.stage = ring.stage == 0 ? Tile::kStages - 1 : ring.stage - 1;
    before.round = ring.stage == 0 ? ring.round : ring.round ^ 1;
    __syncwarp();
    if (lane == 0 && !is_first) arrive(before.empty());
    const uint8_t* const here = shared_tiles + ring.stage * Tile::kStageBytes;
    uint4 words[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i][0] = *reinterpret_cast<const uint4*>(here + source + i * (8 * 128));
      words[i][1] = *reinterpret_cast<const uint4*>(here + (source ^ 16) + i * (8 * 128));
    }
    PhiloxDraw draws[4];
    if constexpr (kDropout) {
      const DrawsOfColumn columns[2] = {dropper.of_column(col), dropper.of_column(col + 8)};
      Dropper::begin(draws, of_row, columns);
    }
    const bool exist[2] = {has_row[0] && col < cols, has_row[1] && col < cols};
    take<T, kDropout>(quantizer, dropper, words, draws, exist, target + step * 64, 8 * cols, scales);
    if constexpr (kDropout) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = dropper.survivors(words[i / 2][i % 2], draws[i]);
    }
    const uint64_t A = Rows::descriptor(ring.tile() + Tile::kBytesOfX);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 &top = words[0][c], &bottom = words[1][c];
      const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y}, second[4] = {top.z, bottom.z, top.w, bottom.w};
      wgmma_along_k<T>(sum, first, moved(A, c * 64));
      wgmma_along_k<T>(sum, second, moved(A, c * 64 + 32));
    }
    wgmma_commit();
    bring(step + Tile::kStages - 1, before);
    __syncwarp();
    ring.advance();
  }
  wgmma_wait();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* const to =
        params.workspace + plan.offset_sums + (static_cast<int64_t>(slice) * rows + row + 8 * i) * kRank + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kRank / 8; ++n) {
      if (row + 8 * i < rows) *reinterpret_cast<float2*>(to + 8 * n) = {sum[4 * n + 2 * i], sum[4 * n + 2 * i + 1]};
    }
  }
  __syncthreads();
  quantizer.leave(params, reinterpret_cast<uint32_t*>(shared_tiles));
#endif
}

template <typename T, int kRank, bool kDropout>
void launch_panels(const QuantizeLoraDownParams& params, const QuantizeLoraDownPlan& plan, cudaStream_t stream) {
  using Tile = Panel<kRank>;
  const int64_t columns = QuantizeLoraDownPlan::arranged_columns(params.cols);
  float* const arranged = params.workspace + plan.offset_A;
  const dim3 arranging(static_cast<unsigned>((columns / 8 * kRank + 255) / 256));
  launch_kernel(arrange_A_kernel<T>, arranging, 256, 0, stream, true, params, uint32_t{kRank},
                reinterpret_cast<uint32_t*>(arranged));
  const auto kernel = quantize_lora_down_panels_kernel<T, kRank, kDropout>;
  const CUtensorMap x_map = tensor_map<T>(params.x, params.rows, params.cols, Tile::kRows);
  const CUtensorMap a_map = tensor_map<T>(arranged, kRank, columns, kRank);
  const dim3 blocks(static_cast<unsigned>(plan.slices * plan.row_blocks));
  launch_kernel(kernel, blocks, Tile::kThreads, Tile::kBytes, stream, true, x_map, a_map, params, plan);
}

}  // namespace
}  // namespace lorakernels
