// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the work of a multiplying warpgroup of sm90_kernel.h.
#pragma once

#include "device/pairs.h"
#include "ops/fp8_gemm/sm90_tiles.h"

namespace lorakernels {
namespace {

template <int kSums>
__device__ void clear(float (&sums)[kSums]) {
#pragma unroll
  for (float& each : sums) each = 0.0f;
}

// Keeps the compiler from reading the sums before wgmma_wait(), after which the tensor cores have written them.
template <int kSums>
__device__ void settle(float (&sums)[kSums]) {
#pragma unroll
  for (float& each : sums) asm volatile("" : "+f"(each)::"memory");
}

template <typename T, bool kE5M2, bool kSplits, typename Tile, int kRankStep>
struct Consumer {
  using RowsOfU = SwizzledRows<kRankStep * 2>;
  static constexpr int kBlocks = Tile::kBlocks, kSums = kBlockRows * kBlockCols / 128;
  const Fp8GemmParams& params;
  uint32_t base;
  int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
  int lane = threadIdx.x % 32;
  int residuals = 0;  // how many were added so far, modulo 2
  float sum[kBlocks][kSums];
  float part[kSums];  // the sums of 128 along depth; later u v, and then the result

  __device__ Consumer(const Fp8GemmParams& params, uint32_t base) : params(params), base(base) {}

  static __device__ int warp() { return threadIdx.x / 32 - 4; }
  __device__ uint32_t box() const { return base + Tile::kOffsetOut + warp() * (2 * kBoxBytes); }
  __device__ uint32_t residual_barrier() const {
    return base + Tile::kOffsetBarriers + (Tile::kResiduals + warp()) * 8;
  }

  __device__ void done_with(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // to = (to if add) + the product over 128 along depth, of one block.
  __device__ void multiply(float (&to)[kSums], uint32_t tile, int block, bool add) const {
    const uint64_t a = Rows::descriptor(tile + Tile::block_row(group, block) * kStepDepth);
    const uint64_t b = Rows::descriptor(tile + Tile::kBytesLeft + Tile::block_col(block) * kStepDepth);
#pragma unroll
    for (int i = 0; i < kStepDepth / 32; ++i) wgmma_fp8<kE5M2>(to, moved(a, i * 32), moved(b, i * 32), add || i > 0);
  }

  // The same for both blocks of a wide tile.
  __device__ void multiply(float (&to)[2][kSums], uint32_t tile, bool add) const {
    const uint64_t a = Rows::descriptor(tile + group * (kBlockRows * kStepDepth));
    const uint64_t b = Rows::descriptor(tile + Tile::kBytesLeft);
#pragma unroll
    for (int i = 0; i < kStepDepth / 32; ++i) wgmma_fp8<kE5M2>(to, moved(a, i * 32), moved(b, i * 32), add || i > 0);
  }

  __device__ void sum_in_parts(TileRing<Tile::kStages, Tile::kStageBytes>& ring) {
    clear(part);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) clear(sum[block]);
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.full(), ring.round);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        wgmma_fence();
        multiply(part, ring.tile(), block, false);
        wgmma_commit();
        wgmma_wait();
        settle(part);
        if (block == kBlocks - 1) done_with(ring.empty());
#pragma unroll
        for (int i = 0; i < kSums; ++i) sum[block][i] += part[i];
      }
    }
  }

  __device__ void sum_at_once(TileRing<Tile::kStages, Tile::kStageBytes>& ring) {
    uint32_t before = 0;
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.full(), ring.round);
      wgmma_fence();
      if constexpr (Tile::kWide) {
        multiply(sum, ring.tile(), at > 0);
      } else {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) multiply(sum[block], ring.tile(), block, at > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (at > 0) done_with(before);
      before = ring.empty();
    }
    wgmma_wait();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) settle(sum[block]);
    done_with(before);
  }

  // part = u v of a block. If the rank fits into one step, u and v stay in shared memory for the tile's other blocks.
  __device__ void multiply_factors(Extras<Tile, kRankStep>& extras, int block) {
    clear(part);
    const uint64_t u = RowsOfU::descriptor(base + Tile::kOffsetU + Tile::block_row(group, block) * (kRankStep * 2));
    const uint32_t v_block = base + Tile::kOffsetV + Tile::block_col(block) * (kRankStep * 2);
    const uint64_t v = Tile::kLinear ? RowsOfU::descriptor(v_block) : Rows::descriptor(v_block, kRankStep * 128);
#pragma unroll 1
    for (int step = 0; step < extras.steps; ++step) {
      if (block == 0 || extras.steps > 1) wait_for(extras.full, extras.round);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kRankStep / 16; ++i) {
        wgmma<T, 0, !Tile::kLinear>(part, moved(u, i * 32), moved(v, i * (Tile::kLinear ? 32 : 16 * 128)),
                                    step > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_wait();
      settle(part);
      const bool stays = extras.steps == 1 || (block == kBlocks - 1 && step == extras.steps - 1);
      if (!stays) arrive(extras.empty), extras.advance();
    }
  }

  // Starts the copy of the residual at (row, col) into the shared memory from which the block's result is stored later.
  __device__ void request_residual(const CUtensorMap& residual, int row, int col) const {
    if (lane == 0) {
      wait_for_stores_to_read();
      arrive_and_expect(residual_barrier(), 2 * kBoxBytes);
      copy_box(box(), residual, col, row, residual_barrier());
      copy_box(box() + kBoxBytes, residual, col + kBlockCols / 2, row, residual_barrier());
    }
  }

  // part = scale ⊙ sum + factor · part + bias + residual.
  __device__ void add_columns(int block) {
    const uint32_t scales = base + Tile::kOffsetScales + (Tile::block_col(block) + lane % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < kBlockCols / 8; ++j) {
      const float2 scale = load_floats(scales + j * 32), bias = load_floats(scales + Tile::kCols * 4 + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = part[4 * j + i] * params.factor + (i % 2 == 0 ? bias.x : bias.y);
        part[4 * j + i] = sum[block][4 * j + i] * (i % 2 == 0 ? scale.x : scale.y) + low;
      }
    }
    if (params.residual == nullptr) return;
    wait_for(residual_barrier(), residuals);
    residuals ^= 1;
#pragma unroll
    for (int j = 0; j < kBlockCols / 8; ++j) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const uint32_t from = box() + j / 8 * kBoxBytes + Rows::offset(lane / 4 + 8 * high, j % 8) + lane % 4 * 4;
        const float2 two = unpacked<T>(load_word(from));
        part[4 * j + 2 * high] += two.x, part[4 * j + 2 * high + 1] += two.y;
      }
    }
  }

  // part = scale · sum + factor · keep ⊙ part.
  __device__ void add_masked(int block, float scale, int row) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      uint32_t mask[4];
      const uint32_t address =
          base + Tile::kOffsetMask + (row + 8 * high) * Tile::kMaskBytes + Tile::block_col(block) / 8;
      load_words(mask, address);
#pragma unroll
      for (uint32_t& word : mask) word = params.dropout.threshold > 0 ? word >> (lane % 4 * 2) : 0;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        const int g = i / 2 % 4, at = i / 2 * 4 + 2 * high + i % 2;
        const float scaled = sum[block][at] * scale;
        const bool drops = mask[i / 8] & (1u << (dropped_shift(g) + i % 2 * 16));
        part[at] = drops ? scaled : scaled + part[at] * params.factor;
      }
    }
  }

  // Stores a warp's 16 rows of `part`, rounded to T.
  __device__ void store(const CUtensorMap& out, int row, int col) const {
    if (lane == 0) wait_for_stores_to_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kBlockCols / 8; j += 2) {
      const uint32_t word[4] = {packed<T>(part[4 * j], part[4 * j + 1]), packed<T>(part[4 * j + 2], part[4 * j + 3]),
                                packed<T>(part[4 * j + 4], part[4 * j + 5]),
                                packed<T>(part[4 * j + 6], part[4 * j + 7])};
      store_matrices(box() + j / 8 * kBoxBytes + Rows::offset(lane % 16, j % 8 + lane / 16), word);
    }
    fence_for_async();
    __syncwarp();
    if (lane == 0) {
      store_box(out, col, row, box());
      store_box(out, col + kBlockCols / 2, row, box() + kBoxBytes);
      commit_stores();
    }
  }

  __device__ void work(const CUtensorMap& out, const CUtensorMap& residual, Extras<Tile, kRankStep> extras) {
    const float scale = Tile::kLinear ? 0.0f : *params.left_scale_inv * *params.right_scale_inv;
    const bool adds = Tile::kLinear && params.residual != nullptr;
    TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      const int col0 = tiles.col(), row0 = tiles.row() + warp() % 4 * kBoxRows;
      const auto row = [&](int block) { return row0 + Tile::block_row(group, block); };
      const auto col = [&](int block) { return col0 + Tile::block_col(block); };
      if (adds) request_residual(residual, row(0), col(0));
      if constexpr (kSplits) {
        sum_in_parts(ring);
      } else {
        sum_at_once(ring);
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (params.rank > 0) {
          multiply_factors(extras, block);
        } else {
          if (extras.any && block == 0) wait_for(extras.full, extras.round);
          clear(part);
        }
        if constexpr (Tile::kLinear) {
          add_columns(block);
        } else if (params.rank > 0) {
          add_masked(block, scale, row(block) - tiles.row() + lane / 4);
        } else {
#pragma unroll
          for (int i = 0; i < kSums; ++i) part[i] = sum[block][i] * scale;
        }
        store(out, row(block), col(block));
        if (adds && block + 1 < kBlocks) request_residual(residual, row(block + 1), col(block + 1));
      }
      if (extras.any) arrive(extras.empty), extras.advance();
    }
    if (lane == 0) wait_for_stores_to_read();
  }
};

}  // namespace
}  // namespace lorakernels
