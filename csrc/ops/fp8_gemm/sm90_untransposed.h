// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the work of a multiplying warpgroup of sm90_kernel.h for dxᵀ = W8ᵀ dy8ᵀ + (ds A)ᵀ.
//
// wgmma reads FP8 from shared memory only along the contraction, and W8's rows run across it. This does not hold for an
// operand in registers. ldmatrix transposes pairs of bytes. Two rows of W8ᵀ are then in the even and the odd bytes of a
// word, and a byte permutation separates them. Therefore a warp has its 16 columns of dx in the order 0, 2, …, 14,
// 1, 3, …, 15. The two rows of dxᵀ that a thread holds are neighbouring columns of dx.
#pragma once

#include "device/ptx/threads.h"
#include "ops/fp8_gemm/sm90_multiply.h"

namespace lorakernels {
namespace {

// A warpgroup multiplies its 64 columns with all rows of the tile, and finishes and stores 64 rows at a time.
template <typename T, bool kE5M2, bool kSplits, typename Tile, int kRankStep>
struct UntransposedConsumer {
  using RowsOfU = SwizzledRows<kRankStep * 2>;
  using Ring = TileRing<Tile::kStages, Tile::kStageBytes>;
  static constexpr int kSums = kBlockRows * Tile::kRows / 128;
  static constexpr int kPieceRows = 64, kPieces = Tile::kRows / kPieceRows, kPieceSums = kSums / kPieces;
  // Whether (ds A)ᵀ of all pieces is multiplied at once where the rank takes several steps. The buffer of u and v is
  // then filled once for each step, else once for each step of each piece.
  static constexpr bool kAtOnce = kSplits && kSums <= 96 && kRankStep > 16;
  static constexpr int kFills = kAtOnce ? 1 : kPieces;
  static constexpr int kPieceBytes = kPieceRows * kBlockRows * 2;
  // Of the 4 operands of 32 along depth that a step has, how many are loaded at a time. The registers hold twice as
  // many, since half of them are multiplied meanwhile.
  static constexpr int kLoads = kSplits && kSums > 64 ? 2 : 4;
  using Words = uint32_t[2][kLoads][4];
  const Fp8GemmParams& params;
  uint32_t base;
  int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);  // computes 64 columns of the tile
  int lane = threadIdx.x % 32;
  int turn = 0;  // which of two boxes the next piece is stored from
  float sum[kSums];
  float result[kPieceSums];  // of a piece; first (ds A)ᵀ alone

  __device__ UntransposedConsumer(const Fp8GemmParams& params, uint32_t base) : params(params), base(base) {}

  static __device__ int warp() { return threadIdx.x / 32 % 4; }
  __device__ uint32_t box() const { return base + Tile::kOffsetOut + (group * 2 + turn) * kPieceBytes; }
  __device__ void meet_group() const { sync_some_threads<128>(1 + group); }

  // Which row of the 32 × 16 bytes of W8, a warp's operand, this lane names to ldmatrix. Matrices 0 and 1 share the
  // first 16 rows, matrices 2 and 3 the next 16. With q = lane % 4, a thread gets rows 4 q to 4 q + 3, two from each
  // matrix. Which two come from which matrix depends on q, so that the rows of a matrix lie in different banks.
  __device__ uint32_t row_to_load() const {
    const int row = lane % 8, matrix = lane / 8;
    return matrix / 2 * 16 + row / 2 * 4 + row % 2 + (matrix % 2 != row / 4 ? 2 : 0);
  }

  // Operands of W8ᵀ. `even` selects the bytes of even columns from two words, the first rows' first.
  __device__ void load_words(uint32_t (&words)[kLoads][4], uint32_t from, uint32_t even) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_matrices_transposed(words[i], from + i * (32 * kStepDepth));
#pragma unroll
    for (auto& word : words) {
      const uint32_t pair[4] = {word[0], word[1], word[2], word[3]};
      word[0] = __byte_perm(pair[0], pair[1], even), word[1] = __byte_perm(pair[0], pair[1], even + 0x1111);
      word[2] = __byte_perm(pair[2], pair[3], even), word[3] = __byte_perm(pair[2], pair[3], even + 0x1111);
    }
  }

  __device__ void done_with(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // to = (to if adds) + the products of kSteps steps. While the tensor cores multiply some words, the next ones are
  // loaded. words[0] are the first step's. At the end they are the first ones of what follows, if there are `more`
  // steps. `before`: the last stage's barrier, which is still to be told that the stage was read; 0: none.
  template <int kSteps, bool kAdds>
  __device__ void multiply(float (&to)[kSums], Words& words, Ring& ring, uint32_t from, uint32_t even, bool more,
                           uint32_t& before) const {
    constexpr int kParts = 4 / kLoads, kTimes = kSteps * kParts;
    static_assert(kTimes % 2 == 0, "what follows begins with words[0]");
#pragma unroll
    for (int time = 0; time < kTimes; ++time) {
      const uint64_t b = moved(Rows::descriptor(ring.tile()), time % kParts * kLoads * 32);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        wgmma_fp8<kE5M2>(to, words[time % 2][i], moved(b, i * 32), kAdds || time + i > 0);
      }
      wgmma_commit();
      const bool ends = time % kParts == kParts - 1;
      const uint32_t now = ring.empty();
      if (ends) ring.advance();
      if (kAdds || time > 0) wgmma_wait<1>();
      if (time % kParts == 0 && (kAdds || time > 0)) done_with(before);
      if (ends) before = now;
      if (time + 1 < kTimes || more) {
        if (ends) wait_for(ring.full(), ring.round);
        load_words(words[(time + 1) % 2],
                   ring.tile() + from + (ends ? 0 : (time + 1) % kParts * kLoads * 32 * kStepDepth), even);
      }
    }
  }

  __device__ void sum_up(Ring& ring) {
    const uint32_t from = Tile::kBytesLeft + Rows::offset(row_to_load(), group * 4 + warp());
    uint32_t even = lane % 4 < 2 ? 0x6420 : 0x2064, before = 0;
    asm volatile("" : "+r"(even));  // stays in a register: the compiler would compute it again in the loop
    Words words;
    wait_for(ring.full(), ring.round);
    load_words(words[0], ring.tile() + from, even);
    if constexpr (kSplits) {
      float part[kSums];
      clear(part), clear(sum);
#pragma unroll 1
      for (int parts = count_steps<kPartSteps>(params) / kPartSteps; parts > 0; --parts) {
        multiply<kPartSteps, false>(part, words, ring, from, even, parts > 1, before);
        wgmma_wait();
        settle(part);
        done_with(before);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sum[i] += part[i];
      }
    } else {
      const int pairs = count_steps<2>(params) / 2;
      clear(sum);
      multiply<2, false>(sum, words, ring, from, even, pairs > 1, before);
#pragma unroll 1
      for (int pair = 1; pair < pairs; ++pair) {
        multiply<2, true>(sum, words, ring, from, even, pair + 1 < pairs, before);
      }
      wgmma_wait();
      settle(sum);
      done_with(before);
    }
  }

  // result = (ds A)ᵀ of a piece. If the rank fits into one step, ds and A stay for the tile's other pieces.
  __device__ void multiply_factors(Extras<Tile, kRankStep>& extras, int piece) {
    clear(result);
    const uint64_t v = Rows::descriptor(base + Tile::kOffsetV + group * (kRankStep * 128));
    const uint64_t u = RowsOfU::descriptor(base + Tile::kOffsetU + piece * (kPieceRows * kRankStep * 2));
#pragma unroll 1
    for (int step = 0; step < extras.steps; ++step) {
      if (piece == 0 || extras.steps > 1) wait_for(extras.full, extras.round);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kRankStep / 16; ++i) {
        wgmma<T, 1, 0>(result, moved(v, i * (16 * 128)), moved(u, i * 32), step > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_wait();
      settle(result);
      const bool stays = extras.steps == 1 || (piece == kPieces - 1 && step == extras.steps - 1);
      if (!stays) arrive(extras.empty), extras.advance();
    }
  }

  // sum = scale · sum + factor · keep ⊙ (ds A)ᵀ, of all pieces.
  __device__ void add_factors(Extras<Tile, kRankStep>& extras, float scale) {
    float part[kPieces][kPieceSums];
#pragma unroll
    for (auto& each : part) clear(each);
    const uint64_t v = Rows::descriptor(base + Tile::kOffsetV + group * (kRankStep * 128));
    const uint64_t u = RowsOfU::descriptor(base + Tile::kOffsetU);
#pragma unroll 1
    for (int step = 0; step < extras.steps; ++step) {
      wait_for(extras.full, extras.round);
      wgmma_fence();
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
        for (int i = 0; i < kRankStep / 16; ++i) {
          wgmma<T, 1, 0>(part[piece], moved(v, i * (16 * 128)), moved(u, piece * (kPieceRows * kRankStep * 2) + i * 32),
                         step > 0 || i > 0);
        }
      }
      wgmma_commit();
      wgmma_wait();
#pragma unroll
      for (auto& each : part) settle(each);
      if (step + 1 < extras.steps) arrive(extras.empty), extras.advance();
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      add_masked(part[piece], scale, piece);
#pragma unroll
      for (int i = 0; i < kPieceSums; ++i) sum[piece * kPieceSums + i] = part[piece][i];
    }
  }

  // result = scale · sum + factor · keep ⊙ result.
  __device__ void add_masked(float (&result)[kPieceSums], float scale, int piece) const {
    const int pair = lane / 4, first = group * kBlockRows + warp() * 16;
    const int row = piece * kPieceRows + lane % 4 * 2;
    const uint32_t from = base + Tile::kOffsetMask + first / 32 * 4 + row * Tile::kMaskBytes;
    const uint32_t even = dropped_shift(first / 8 % 4 + pair / 4) + pair % 4 * 2;
#pragma unroll
    for (int j = 0; j < kPieceRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t mask = 0;
        if (params.dropout.threshold > 0) {
          mask = load_word(from + (8 * j + i) * Tile::kMaskBytes) >> even;
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int at = 4 * j + 2 * odd + i;
          const float scaled = sum[piece * kPieceSums + at] * scale;
          result[at] = mask & (1u << (16 * odd)) ? scaled : scaled + result[at] * params.factor;
        }
      }
    }
  }

  // Stores a piece's 64 rows of this warpgroup's 64 columns, rounded to T. A thread has pairs of neighbouring columns.
  // There are two boxes, so that one is filled while the other is stored.
  __device__ void store(const CUtensorMap& out, int row, int col) {
    const bool stores = threadIdx.x % 128 == 0;
    if (stores) wait_for_stores_to_read<1>();
    meet_group();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t to = box() + Rows::offset(lane % 4 * 2 + i, warp() * 2 + lane / 16) + lane / 4 % 4 * 4;
#pragma unroll
      for (int j = 0; j < kPieceRows / 8; ++j) {
        store_shared(to + j * (8 * 128), packed<T>(result[4 * j + i], result[4 * j + 2 + i]));
      }
    }
    fence_for_async();
    meet_group();
    if (stores) {
      store_box(out, col, row, box());
      commit_stores();
    }
    turn ^= 1;
  }

  __device__ void work(const CUtensorMap& out, const CUtensorMap&, Extras<Tile, kRankStep> extras) {
    float scale = Tile::kGrouped ? 0.0f : *params.left_scale_inv * *params.right_scale_inv;
    Ring ring(base, base + Tile::kOffsetBarriers);
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      const int of = tiles.group(params);
      if (of < 0) continue;
      const int own = weight_of(params, of);
      if (Tile::kGrouped) scale = params.left_scale_inv[own] * params.right_scale_inv[own];
      sum_up(ring);
      const bool at_once = kAtOnce && extras.steps > 1;
      if constexpr (kAtOnce) {
        if (at_once) add_factors(extras, scale);
      }
      const float rest = at_once ? 1.0f : scale;  // what a sum is multiplied by without a product of factors
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        if (params.rank > 0 && !at_once) {
          multiply_factors(extras, piece);
          add_masked(result, scale, piece);
        } else {
#pragma unroll
          for (int i = 0; i < kPieceSums; ++i) result[i] = sum[piece * kPieceSums + i] * rest;
        }
        store(out, tiles.row() + piece * kPieceRows, tiles.col() + group * kBlockRows);
      }
      if (extras.any) arrive(extras.empty), extras.advance();
    }
    if (threadIdx.x % 128 == 0) wait_for_stores_to_read();
  }
};

}  // namespace
}  // namespace lorakernels
