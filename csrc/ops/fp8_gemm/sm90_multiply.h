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

// A warpgroup multiplies one block at a time, and finishes and rounds one piece of a block at a time. With splits the
// sums of two blocks fill its registers, so that a piece is half a block, whose own sums still fit.
template <typename T, bool kE5M2, bool kSplits, typename Tile, int kRankStep>
struct Consumer {
  using RowsOfU = SwizzledRows<kRankStep * 2>;
  using Ring = TileRing<Tile::kStages, Tile::kStageBytes>;
  static constexpr int kBlocks = Tile::kBlocks, kSums = kBlockRows * kBlockCols / 128;
  static constexpr int kPieces = kSplits || Tile::kOutBoxes == 1 ? 2 : 1, kPieceCols = kBlockCols / kPieces,
                       kPieceSums = kSums / kPieces;
  // Whether a tile begins with u v. In blocks that is what its sums can be added to. A gradient would take longer so.
  static constexpr bool kBegins = Tile::kScaledBlocks && Tile::kLinear;
  // Of the buffer of u and v, where the rank takes several steps: each piece, or the whole tile at once.
  static constexpr int kFills = kBegins ? 1 : kBlocks * kPieces;
  const Fp8GemmParams& params;
  uint32_t base;
  int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
  int lane = threadIdx.x % 32;
  int residuals = 0;  // how many were added so far, modulo 2
  float sum[kBlocks][kSums];
  float result[kPieceSums];  // of a piece; first u v alone

  __device__ Consumer(const Fp8GemmParams& params, uint32_t base) : params(params), base(base) {}

  static __device__ int warp() { return threadIdx.x / 32 - 4; }
  static __device__ int piece_col(int block, int piece) { return Tile::block_col(block) + piece * kPieceCols; }
  __device__ uint32_t box() const { return base + Tile::kOffsetOut + warp() * (Tile::kOutBoxes * kBoxBytes); }
  __device__ uint32_t residual_barrier() const {
    return base + Tile::kOffsetBarriers + (Tile::kResiduals + warp()) * 8;
  }

  __device__ void done_with(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  }

  // to = (to if add) + the product over 128 along depth, of one block.
  __device__ void multiply(float (&to)[kSums], uint32_t tile, bool add, int block = 0) const {
    const uint64_t a = Rows::descriptor(tile + group * (kBlockRows * kStepDepth));
    const uint64_t b = Rows::descriptor(tile + Tile::kBytesLeft + block * (kBlockCols * kStepDepth));
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

  // part = the products of kPartSteps steps. Until the last of them the tensor cores always have a step before them.
  __device__ void multiply_part(float (&part)[kSums], Ring& ring) const {
    uint32_t before = 0;
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step, ring.advance()) {
      wait_for(ring.full(), ring.round);
      wgmma_fence();
      multiply(part, ring.tile(), step > 0);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        done_with(before);
      }
      before = ring.empty();
    }
    wgmma_wait();
    settle(part);
    done_with(before);
  }

  __device__ void sum_in_parts(Ring& ring) {
    static_assert(!kSplits || kBlocks == 1, "of two blocks' parts the registers hold one");
    float part[kSums];
    clear(part), clear(sum[0]);
#pragma unroll 1
    for (int parts = count_steps<kPartSteps>(params) / kPartSteps; parts > 0; --parts) {
      multiply_part(part, ring);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[0][i] += part[i];
    }
  }

  __device__ void sum_at_once(Ring& ring) {
    uint32_t before = 0;
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.full(), ring.round);
      wgmma_fence();
      if constexpr (Tile::kWide) {
        multiply(sum, ring.tile(), at > 0);
      } else {
        multiply(sum[0], ring.tile(), at > 0);
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

  // The scales of a step that a thread's sums are multiplied by: its two rows', and of each block of columns.
  struct Factors {
    float row[2], block[kBlocks];
  };

  // Where they are. Rows and columns beyond the output are not stored. They read the scales of the last ones inside.
  // Those of the weight are [blocks of columns, steps] for kLinear, else [steps, blocks of columns].
  struct FactorsAt {
    uint32_t rows, steps, left, above, right, to_next;

    __device__ FactorsAt(const Fp8GemmParams& params, int row, int col)
        : rows(static_cast<uint32_t>(params.rows)), steps(static_cast<uint32_t>(count_steps<1>(params))) {
      left = min(static_cast<uint32_t>(row), rows - 1), above = min(row + 8u, rows - 1) - left;
      const uint32_t per_block = Tile::kLinear ? steps : 1;
      right = col / kBlockCols * per_block, to_next = kBlocks > 1 && col + kBlockCols < params.cols ? per_block : 0;
    }
    __device__ void advance(const Fp8GemmParams& params) {
      left += rows, right += Tile::kLinear ? 1 : Tiles<Tile>::count(params.cols, kBlockCols);
    }
    __device__ Factors fetch(const Fp8GemmParams& params) const {
      Factors factors{{params.left_scale_inv[left], params.left_scale_inv[left + above]}, {}};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        factors.block[block] = params.right_scale_inv[right + block * to_next];
      }
      return factors;
    }
  };

  // sum[block] += factors ⊙ part, once the tensor cores have written it. The factors were fetched a step before. They
  // are settled here, because the compiler would else multiply them, and wait for them, before the tensor cores start.
  __device__ void promote(float (&part)[kSums], int block, Factors& factors) {
    settle(part), settle(factors.row), settle(factors.block);
    const float low = factors.row[0] * factors.block[block], high = factors.row[1] * factors.block[block];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[block][i] += part[i] * (i % 4 < 2 ? low : high);
  }

  // sum = factor · u v + bias of the whole tile. Blocks are scaled before they are added to it. So the buffer of u, v
  // and bias is free again, and is filled for the next tile while this one is multiplied.
  __device__ void begin_with_factors(Extras<Tile, kRankStep>& extras) {
#pragma unroll
    for (auto& each : sum) clear(each);
    const uint64_t u = RowsOfU::descriptor(base + Tile::kOffsetU + group * (kBlockRows * kRankStep * 2));
#pragma unroll 1
    for (int step = 0; step < extras.steps; ++step) {
      wait_for(extras.full, extras.round);
      if (params.rank > 0) {
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const uint64_t v = RowsOfU::descriptor(base + Tile::kOffsetV + Tile::block_col(block) * (kRankStep * 2));
#pragma unroll
          for (int i = 0; i < kRankStep / 16; ++i) wgmma<T, 0, 0>(sum[block], moved(u, i * 32), moved(v, i * 32), true);
        }
        wgmma_commit();
        wgmma_wait();
#pragma unroll
        for (auto& each : sum) settle(each);
      }
      if (step + 1 < extras.steps) arrive(extras.empty), extras.advance();
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) begin_columns(block);
    arrive(extras.empty), extras.advance();
  }

  // sum = factor · sum + bias of a block.
  __device__ void begin_columns(int block) {
    const uint32_t biases = base + Tile::kOffsetScales + (Tile::kCols + Tile::block_col(block) + lane % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < kBlockCols / 8; ++j) {
      const float2 bias = load_floats(biases + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& each = sum[block][4 * j + i];
        each = each * params.factor + (i % 2 == 0 ? bias.x : bias.y);
      }
    }
  }

  // sum += the products of operands with scales of 1 × 128 and 128 × 128. The tensor cores sum a step's products. Times
  // the scales, fp32 adds them over the steps. row: a thread's first. The other warpgroups multiply while one adds.
  __device__ void sum_scaled_blocks(Ring& ring, int row, int col) {
    FactorsAt at(params, row, col);
    float part[kSums];
    clear(part);
    Factors next = at.fetch(params);
#pragma unroll 1
    for (uint32_t left = at.steps; left > 0; --left, ring.advance()) {
      Factors factors = next;
      if (left > 1) at.advance(params);
      next = at.fetch(params);
      wait_for(ring.full(), ring.round);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        wgmma_fence();
        multiply(part, ring.tile(), false, block);
        wgmma_commit();
        wgmma_wait();
        if (block == kBlocks - 1) done_with(ring.empty());
        promote(part, block, factors);
      }
    }
  }

  // The same with two parts: while one is added, the tensor cores fill the other. The steps are multiples of
  // kPartSteps; those beyond the depth multiply zeros, and the last step's factors.
  __device__ void sum_scaled_block_pairs(Ring& ring, int row, int col) {
    FactorsAt at(params, row, col);
    float part[2][kSums];
    clear(part[0]), clear(part[1]);
    uint32_t empty[2], left = at.steps;
    Factors factors[2], next = at.fetch(params);
    const auto begin = [&](int i) {
      factors[i] = next;
      if (left > 1) at.advance(params), --left;
      next = at.fetch(params);
      wait_for(ring.full(), ring.round);
      wgmma_fence();
      multiply(part[i], ring.tile(), false);
      wgmma_commit();
      empty[i] = ring.empty();
      ring.advance();
    };
    const auto finish = [&](int i) {
      done_with(empty[i]);
      promote(part[i], 0, factors[i]);
    };
#pragma unroll 1
    for (int parts = count_steps<kPartSteps>(params) / kPartSteps; parts > 0; --parts) {
      begin(0);
#pragma unroll
      for (int i = 1; i < kPartSteps; ++i) begin(i % 2), wgmma_wait<1>(), finish(1 - i % 2);
      wgmma_wait(), finish(1);
    }
  }

  // result = u v of a piece. If the rank fits into one step, u and v stay in shared memory for the tile's other pieces.
  __device__ void multiply_factors(Extras<Tile, kRankStep>& extras, int block, int piece) {
    clear(result);
    const uint64_t u = RowsOfU::descriptor(base + Tile::kOffsetU + group * (kBlockRows * kRankStep * 2));
    const uint32_t v_piece = base + Tile::kOffsetV + piece_col(block, piece) * (kRankStep * 2);
    const uint64_t v = Tile::kLinear ? RowsOfU::descriptor(v_piece) : Rows::descriptor(v_piece, kRankStep * 128);
    const bool is_first = block + piece == 0, is_last = block == kBlocks - 1 && piece == kPieces - 1;
#pragma unroll 1
    for (int step = 0; step < extras.steps; ++step) {
      if (is_first || extras.steps > 1) wait_for(extras.full, extras.round);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kRankStep / 16; ++i) {
        wgmma<T, 0, !Tile::kLinear>(result, moved(u, i * 32), moved(v, i * (Tile::kLinear ? 32 : 16 * 128)),
                                    step > 0 || i > 0);
      }
      wgmma_commit();
      wgmma_wait();
      settle(result);
      const bool stays = extras.steps == 1 || (is_last && step == extras.steps - 1);
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

  // result = scale ⊙ sum + factor · result + bias + residual.
  __device__ void add_columns(int block, int piece) {
    const uint32_t scales = base + Tile::kOffsetScales + (piece_col(block, piece) + lane % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < kPieceCols / 8; ++j) {
      const float2 scale = load_floats(scales + j * 32), bias = load_floats(scales + Tile::kCols * 4 + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = result[4 * j + i] * params.factor + (i % 2 == 0 ? bias.x : bias.y);
        result[4 * j + i] = sum[block][piece * kPieceSums + 4 * j + i] * (i % 2 == 0 ? scale.x : scale.y) + low;
      }
    }
    add_residual(piece);
  }

  // result += residual.
  __device__ void add_residual(int piece) {
    if (params.residual == nullptr) return;
    if (piece == 0) {
      wait_for(residual_barrier(), residuals);
      residuals ^= 1;
    }
#pragma unroll
    for (int j = 0; j < kPieceCols / 8; ++j) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int chunk = piece * (kPieceCols / 8) + j;
        const uint32_t from =
            box() + chunk / 8 * kBoxBytes + Rows::offset(lane / 4 + 8 * high, chunk % 8) + lane % 4 * 4;
        const float2 two = unpacked<T>(load_word(from));
        result[4 * j + 2 * high] += two.x, result[4 * j + 2 * high + 1] += two.y;
      }
    }
  }

  // result = sum + factor · keep ⊙ result. row: of the tile, the thread's first.
  __device__ void add_masked(int block, int piece, int row) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const uint32_t from =
          base + Tile::kOffsetMask + (row + 8 * high) * Tile::kMaskBytes + piece_col(block, piece) / 8;
#pragma unroll
      for (int word = 0; word < kPieceCols / 32; ++word) {
        const uint32_t mask = params.dropout.threshold > 0 ? load_word(from + word * 4) >> (lane % 4 * 2) : 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int g = i / 2, at = (word * 4 + g) * 4 + 2 * high + i % 2;
          const float product = sum[block][piece * kPieceSums + at];
          const bool drops = mask & (1u << (dropped_shift(g) + i % 2 * 16));
          result[at] = drops ? product : product + result[at] * params.factor;
        }
      }
    }
  }

  // Leaves a warp's 16 rows of a piece, rounded to T, where they are stored from.
  __device__ void stage(int piece) const {
    if ((Tile::kOutBoxes == 1 || piece == 0) && lane == 0) wait_for_stores_to_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPieceCols / 8; j += 2) {
      const int chunk = (Tile::kOutBoxes == 1 ? 0 : piece * (kPieceCols / 8)) + j;
      const float* four = &result[4 * j];
      const uint32_t word[4] = {packed<T>(four[0], four[1]), packed<T>(four[2], four[3]), packed<T>(four[4], four[5]),
                                packed<T>(four[6], four[7])};
      store_matrices(box() + chunk / 8 * kBoxBytes + Rows::offset(lane % 16, chunk % 8 + lane / 16), word);
    }
  }

  // Stores what was staged: a block, or a piece of it where that fills the only box.
  __device__ void store(const CUtensorMap& out, int row, int col) const {
    fence_for_async();
    __syncwarp();
    if (lane == 0) {
      store_box(out, col, row, box());
      if constexpr (Tile::kOutBoxes == 2) store_box(out, col + kBlockCols / 2, row, box() + kBoxBytes);
      commit_stores();
    }
  }

  __device__ void finish(Extras<Tile, kRankStep>& extras, int block, int piece) {
    if constexpr (kBegins) {
#pragma unroll
      for (int i = 0; i < kPieceSums; ++i) result[i] = sum[block][piece * kPieceSums + i];
      return add_residual(piece);
    }
    if (params.rank > 0) {
      multiply_factors(extras, block, piece);
    } else {
      if (extras.any && block + piece == 0) wait_for(extras.full, extras.round);
      clear(result);
    }
    if constexpr (Tile::kLinear) {
      add_columns(block, piece);
    } else if (params.rank > 0) {
      add_masked(block, piece, group * kBlockRows + warp() % 4 * kBoxRows + lane / 4);
    } else {
#pragma unroll
      for (int i = 0; i < kPieceSums; ++i) result[i] = sum[block][piece * kPieceSums + i];
    }
  }

  __device__ void work(const CUtensorMap& out, const CUtensorMap& residual, Extras<Tile, kRankStep> extras) {
    static_assert(Tile::kLinear || Tile::kScaledBlocks, "nothing multiplies a gradient's sums by one scale");
    const bool adds = Tile::kLinear && params.residual != nullptr;
    Ring ring(base, base + Tile::kOffsetBarriers);
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      if (tiles.group(params) < 0) continue;
      const int row = tiles.row() + group * kBlockRows + warp() % 4 * kBoxRows, col0 = tiles.col();
      const auto col = [&](int block) { return col0 + Tile::block_col(block); };
      extras.begin(params, col0);
      if (adds) request_residual(residual, row, col(0));
      if constexpr (kBegins) {
        begin_with_factors(extras);
      } else if constexpr (Tile::kScaledBlocks) {
#pragma unroll
        for (auto& each : sum) clear(each);
      }
      if constexpr (Tile::kPairs) {
        sum_scaled_block_pairs(ring, row + lane / 4, col0);
      } else if constexpr (Tile::kScaledBlocks) {
        sum_scaled_blocks(ring, row + lane / 4, col0);
      } else if constexpr (kSplits) {
        sum_in_parts(ring);
      } else {
        sum_at_once(ring);
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          finish(extras, block, piece);
          stage(piece);
          if constexpr (Tile::kOutBoxes == 1) store(out, row, col(block) + piece * kPieceCols);
        }
        if constexpr (Tile::kOutBoxes == 2) store(out, row, col(block));
        if (adds && block + 1 < kBlocks) request_residual(residual, row, col(block + 1));
      }
      if (extras.any && !kBegins) arrive(extras.empty), extras.advance();
    }
    if (lane == 0) wait_for_stores_to_read();
  }
};

}  // namespace
}  // namespace lorakernels
