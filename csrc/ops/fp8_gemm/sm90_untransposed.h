// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the work of a multiplying warpgroup of sm90_kernel.h for dxᵀ = W8ᵀ dy8ᵀ + (ds A)ᵀ.
//
// wgmma reads FP8 from shared memory only along the contraction, and W8's rows run across it. An operand in registers
// is free of that rule. ldmatrix transposes pairs of bytes, which leaves two rows of W8ᵀ in the even and the odd bytes
// of a word, and a byte permutation separates them. Therefore a warp has its 16 columns of dx in the order 0, 2, …, 14,
// 1, 3, …, 15, and the two rows of dxᵀ that a thread holds are neighbouring columns of dx.
#pragma once

#include "device/ptx/threads.h"
#include "ops/fp8_gemm/sm90_multiply.h"

namespace lorakernels {
namespace {

template <typename T, bool kE5M2, typename Tile, int kRankStep>
struct UntransposedConsumer {
  using RowsOfU = SwizzledRows<kRankStep * 2>;
  static constexpr int kSums = kBlockRows * Tile::kRows / 128, kBoxOfGroup = Tile::kRows * kBlockRows * 2;
  const Fp8GemmParams& params;
  uint32_t base;
  int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);  // computes 64 columns of the tile
  int lane = threadIdx.x % 32;
  float sum[kSums];
  float part[kSums];  // the sums of 128 along depth; later (ds A)ᵀ, and then the result

  __device__ UntransposedConsumer(const Fp8GemmParams& params, uint32_t base) : params(params), base(base) {}

  static __device__ int warp() { return threadIdx.x / 32 % 4; }
  __device__ uint32_t box() const { return base + Tile::kOffsetOut + group * kBoxOfGroup; }
  __device__ void meet_group() const { sync_some_threads<128>(1 + group); }

  // Which row of the 32 × 16 bytes of W8, a warp's operand, this lane names to ldmatrix. Matrices 0 and 1 share the
  // first 16 rows, matrices 2 and 3 the next 16. With q = lane % 4, a thread gets rows 4 q to 4 q + 3, two from each
  // matrix. Which two come from which matrix depends on q, so that the rows of a matrix lie in different banks.
  __device__ uint32_t row_to_load() const {
    const int row = lane % 8, matrix = lane / 8;
    return matrix / 2 * 16 + row / 2 * 4 + row % 2 + (matrix % 2 != row / 4 ? 2 : 0);
  }

  // part = the product over 128 along depth of W8's tile at `from` and dy8's at `tile`. `even` selects the bytes of
  // even columns from two words, the first rows' first. One half is multiplied while the other half is permuted.
  __device__ void multiply(uint32_t from, uint32_t tile, uint32_t even) {
    const uint64_t b = Rows::descriptor(tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_matrices_transposed(a[i], from + (2 * half + i) * (32 * kStepDepth));
#pragma unroll
      for (auto& word : a) {
        const uint32_t pair[4] = {word[0], word[1], word[2], word[3]};
        word[0] = __byte_perm(pair[0], pair[1], even), word[1] = __byte_perm(pair[0], pair[1], even + 0x1111);
        word[2] = __byte_perm(pair[2], pair[3], even), word[3] = __byte_perm(pair[2], pair[3], even + 0x1111);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) wgmma_fp8<kE5M2>(part, a[i], moved(b, (2 * half + i) * 32), half + i > 0);
    }
    wgmma_commit();
    wgmma_wait();
    settle(part);
  }

  __device__ void sum_up(TileRing<Tile::kStages, Tile::kStageBytes>& ring) {
    const uint32_t from = Tile::kBytesLeft + Rows::offset(row_to_load(), group * 4 + warp());
    uint32_t even = lane % 4 < 2 ? 0x6420 : 0x2064;
    asm volatile("" : "+r"(even));  // stays in a register: the compiler would compute it again in the loop
    clear(part), clear(sum);
#pragma unroll 1
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.full(), ring.round);
      multiply(ring.tile() + from, ring.tile(), even);
      __syncwarp();
      if (lane == 0) arrive(ring.empty());
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[i] += part[i];
    }
  }

  // part = (ds A)ᵀ.
  __device__ void multiply_factors(Extras<Tile, kRankStep>& extras) {
    clear(part);
    const uint64_t v = Rows::descriptor(base + Tile::kOffsetV + group * (kRankStep * 128));
    const uint64_t u = RowsOfU::descriptor(base + Tile::kOffsetU);
#pragma unroll 1
    for (int step = 0; step < extras.steps; ++step) {
      wait_for(extras.full, extras.round);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kRankStep / 16; ++i) {
        wgmma<T, 1, 0>(part, moved(v, i * (16 * 128)), moved(u, i * 32), step > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_wait();
      settle(part);
      if (step + 1 < extras.steps) arrive(extras.empty), extras.advance();
    }
  }

  // part = scale · sum + factor · keep ⊙ part.
  __device__ void add_masked(float scale) {
    const int pair = lane / 4, first = group * kBlockRows + warp() * 16;
    const uint32_t from = base + Tile::kOffsetMask + first / 32 * 4 + lane % 4 * 2 * Tile::kMaskBytes;
    const uint32_t even = dropped_shift(first / 8 % 4 + pair / 4) + pair % 4 * 2;
#pragma unroll
    for (int j = 0; j < Tile::kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t mask = 0;
        if (params.dropout.threshold > 0) {
          mask = load_word(from + (8 * j + i) * Tile::kMaskBytes) >> even;
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int at = 4 * j + 2 * odd + i;
          const float scaled = sum[at] * scale;
          part[at] = mask & (1u << (16 * odd)) ? scaled : scaled + part[at] * params.factor;
        }
      }
    }
  }

  // Stores the tile's rows of this warpgroup's 64 columns, rounded to T. A thread has pairs of neighbouring columns.
  __device__ void store(const CUtensorMap& out, int row, int col) const {
    const bool stores = threadIdx.x % 128 == 0;
    if (stores) wait_for_stores_to_read();
    meet_group();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t to = box() + Rows::offset(lane % 4 * 2 + i, warp() * 2 + lane / 16) + lane / 4 % 4 * 4;
#pragma unroll
      for (int j = 0; j < Tile::kRows / 8; ++j) {
        store_shared(to + j * (8 * 128), packed<T>(part[4 * j + i], part[4 * j + 2 + i]));
      }
    }
    fence_for_async();
    meet_group();
    if (stores) {
      store_box(out, col, row, box());
      commit_stores();
    }
  }

  __device__ void work(const CUtensorMap& out, const CUtensorMap&, Extras<Tile, kRankStep> extras) {
    const float scale = *params.left_scale_inv * *params.right_scale_inv;
    TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      sum_up(ring);
      if (params.rank > 0) {
        multiply_factors(extras);
        add_masked(scale);
        arrive(extras.empty), extras.advance();
      } else {
#pragma unroll
        for (int i = 0; i < kSums; ++i) part[i] = sum[i] * scale;
      }
      store(out, tiles.row(), tiles.col() + group * kBlockRows);
    }
    if (threadIdx.x % 128 == 0) wait_for_stores_to_read();
  }
};

}  // namespace
}  // namespace lorakernels
