// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the kernel behind fp8_gemm.h.
//
// One block per multiprocessor walks over the tiles. Its first warpgroup serves the others: warp 0 has the tensor copy
// engine fill a ring of operand tiles; warps 1 to 3 meanwhile fetch u, v and what belongs to columns, and draw the
// tile's mask, so that nothing of it is left for the tensor cores to wait for. The other warpgroups multiply, 64 rows
// of the tile each. What they have goes to shared memory, from where the copy engine stores it while the next tile is
// multiplied; a residual comes in by the same place.
#pragma once

#include <algorithm>

#include "fp8_gemm.h"
#include "launch.h"
#include "pairs.h"
#include "tma.h"
#include "wgmma.h"

namespace lorakernels {
namespace {

constexpr int kHelpers = 96;     // threads of warps 1 to 3
constexpr int kStepDepth = 128;  // bytes of a row of an operand's tile
constexpr int kBlockRows = 64;   // what a warpgroup multiplies and stores at a time
constexpr int kBlockCols = 128;
constexpr int kBoxRows = 16;  // of what a warp stores at once, 64 columns of two bytes
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kGroup = 8;  // row tiles that share their column tiles in the L2 cache

using Rows = SwizzledRows<128>;

enum class Product { kLinear, kGradInput };
enum class Shape { kSmall, kTall, kTallest, kWide };  // 128 × 128, 192 × 128, 256 × 128, 128 × 256

template <Product kProduct, Shape kShape, int kRankStep>
struct Tiling {
  static constexpr bool kLinear = kProduct == Product::kLinear, kWide = kShape == Shape::kWide;
  static constexpr int kConsumers = kShape == Shape::kTall ? 3 : 2;  // warpgroups
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 152 : 224;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlocks = kWide || kShape == Shape::kTallest ? 2 : 1;  // of a warpgroup: beside or below
  static constexpr int kRows = kConsumers * (kWide ? 1 : kBlocks) * kBlockRows, kCols = (kWide ? 2 : 1) * kBlockCols;
  static constexpr int kBytesLeft = kRows * kStepDepth, kStageBytes = kBytesLeft + kCols * kStepDepth;
  static constexpr int kStages = kShape == Shape::kSmall ? 5 : kShape == Shape::kTall && kRankStep <= 16 ? 4 : 3;
  static constexpr int kMaskBytes = kLinear ? 0 : kCols / 8;  // of a row
  static constexpr int kOffsetOut = kStages * kStageBytes;
  static constexpr int kOffsetU = kOffsetOut + kConsumers * 4 * 2 * kBoxBytes;
  static constexpr int kOffsetV = kOffsetU + kRows * kRankStep * 2;
  static constexpr int kOffsetMask = kOffsetV + kCols * kRankStep * 2;
  static constexpr int kOffsetScales = kOffsetMask + kRows * kMaskBytes;  // of columns, then the bias; fp32
  static constexpr int kOffsetBarriers = kOffsetScales + (kLinear ? 2 * kCols * 4 : 0);
  static constexpr int kExtras = 2 * kStages, kResiduals = kExtras + 2;  // barriers: of the ring, extras, every warp's
  static constexpr int kBytes = kOffsetBarriers + (kResiduals + (kLinear ? kConsumers * 4 : 0)) * 8;
  static_assert(kBytes <= 227 * 1024);

  static __device__ int block_row(int group, int block) {
    return (kWide ? group : group * kBlocks + block) * kBlockRows;
  }
  static __device__ int block_col(int block) { return kWide ? block * kBlockCols : 0; }
};

// The tiles of one block, in its order: of a group of row tiles, all that share their columns follow each other.
template <typename Tile>
struct Tiles {
  int rows, cols, at;

  __device__ Tiles(const Fp8GemmParams& params)
      : rows(count(params.rows, Tile::kRows)), cols(count(params.cols, Tile::kCols)), at(blockIdx.x) {}

  static __host__ __device__ int count(int64_t size, int of) { return static_cast<int>((size + of - 1) / of); }
  __device__ bool left() const { return at < rows * cols; }
  __device__ void advance() { at += gridDim.x; }
  __device__ int first() const { return at / (kGroup * cols) * kGroup; }
  __device__ int in_group() const { return min(rows - first(), kGroup); }
  __device__ int row() const { return (first() + at % (kGroup * cols) % in_group()) * Tile::kRows; }
  __device__ int col() const { return at % (kGroup * cols) / in_group() * Tile::kCols; }
};

// What the helpers hand to the multiplying warpgroups: u, v, the mask and the columns' numbers of a tile. A rank above
// one step takes several fills, and every block of rows its own. All that write and all that read arrive, each for
// itself.
template <typename Tile, int kRankStep>
struct Extras {
  uint32_t full, empty;
  int steps;
  bool any;
  int round = 0;

  __device__ Extras(uint32_t barriers, const Fp8GemmParams& params)
      : full(barriers),
        empty(barriers + 8),
        steps(max(1, static_cast<int>((params.rank + kRankStep - 1) / kRankStep))),
        any(Tile::kLinear || params.rank > 0) {}
  __device__ int times() const { return steps > 1 ? Tile::kBlocks : 1; }
  __device__ void advance() { round ^= 1; }
};

// Of the 8 columns that `draw` serves: bit 2 w is set where column 2 w is dropped, bit 16 + 2 w where 2 w + 1 is.
// In lanes of 16 bits: max(lane, threshold) differs from the lane where that is below the threshold.
__device__ uint32_t dropped(const PhiloxDraw& draw, uint32_t two_thresholds) {
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    bits += __vminu2(draw.word[w] ^ __vmaxu2(draw.word[w], two_thresholds), 0x00010001u) << (2 * w);
  }
  return bits;
}

__device__ __forceinline__ float as_float(const void* data, FloatType type, int64_t at) {
  switch (type) {
    case FloatType::kFloat32:
      return static_cast<const float*>(data)[at];
    case FloatType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    default:
      return __half2float(static_cast<const __half*>(data)[at]);
  }
}

template <typename T, typename Tile, int kRankStep>
struct Helper {
  using RowsOfU = SwizzledRows<kRankStep * 2>;
  const Fp8GemmParams& params;
  uint32_t base;

  __device__ Helper(const Fp8GemmParams& params, uint32_t base) : params(params), base(base) {}

  static __device__ int thread() { return threadIdx.x - 32; }

  // Rows of kRankStep elements, from row0 and rank0 of a matrix with u_stride in a row.
  __device__ void fetch_rows(uint32_t to, const void* matrix, bool is_fp32, int count, int row0, int64_t rows,
                             int rank0) const {
    constexpr int kChunks = kRankStep / 8;
#pragma unroll 1
    for (int i = thread(); i < count * kChunks; i += kHelpers) {
      const int64_t row = row0 + i / kChunks, col = rank0 + i % kChunks * 8;
      fetch_eight(to + RowsOfU::offset(i / kChunks, i % kChunks), matrix, is_fp32, row * params.u_stride + col,
                  row < rows && col < params.u_stride && params.rank > 0);
    }
  }

  // [column half][kRankStep] rows of 128 bytes, from columns of v.
  __device__ void fetch_columns(int col0, int rank0) const {
    constexpr int kChunks = Tile::kCols / 8;
#pragma unroll 1
    for (int i = thread(); i < kRankStep * kChunks; i += kHelpers) {
      const int row = i / kChunks, chunk = i % kChunks;
      fetch_eight(base + Tile::kOffsetV + chunk / 8 * (kRankStep * 128) + Rows::offset(row, chunk % 8), params.v,
                  params.v_dtype == FloatType::kFloat32, (rank0 + row) * params.cols + col0 + chunk * 8,
                  rank0 + row < params.rank && col0 + chunk * 8 < params.cols);
    }
  }

  __device__ void fetch_eight(uint32_t to, const void* matrix, bool is_fp32, int64_t at, bool exists) const {
    const int64_t from = exists ? at : 0;
    if (!is_fp32) return copy_async(to, static_cast<const T*>(matrix) + from, exists);
    float4 low{}, high{};
    if (exists) {
      const auto source = reinterpret_cast<const float4*>(static_cast<const float*>(matrix) + from);
      low = source[0], high = source[1];
    }
    store_shared(to, make_uint4(packed<T>(low.x, low.y), packed<T>(low.z, low.w), packed<T>(high.x, high.y),
                                packed<T>(high.z, high.w)));
  }

  __device__ void fetch_scales(int col0) const {
    const float scale = *params.left_scale_inv;
#pragma unroll 1
    for (int i = thread(); i < Tile::kCols; i += kHelpers) {
      const bool exists = col0 + i < params.cols;
      const int64_t col = exists ? col0 + i : 0;
      const float bias = params.bias == nullptr ? 0.0f : as_float(params.bias, params.bias_dtype, col);
      store_float(base + Tile::kOffsetScales + i * 4, scale * params.right_scale_inv[params.by_column ? col : 0]);
      store_float(base + Tile::kOffsetScales + (Tile::kCols + i) * 4, bias);
    }
  }

  __device__ void fetch_mask(int row0, int col0) const {
    constexpr int kChunks = Tile::kMaskBytes / 16;
    const int64_t words = dropped_words(params.cols);
#pragma unroll 1
    for (int i = thread(); i < Tile::kRows * kChunks; i += kHelpers) {
      const int64_t row = row0 + i / kChunks, word = col0 / 32 + i % kChunks * 4;
      const bool exists = row < params.rows && word < words;
      copy_async(base + Tile::kOffsetMask + i * 16, params.dropped + (exists ? row * words + word : 0), exists);
    }
  }

  // dropout.h's bits.
  __device__ void draw_mask(int row0, int col0) const {
    constexpr int kWords = Tile::kMaskBytes / 4;
    const DropoutParams& dropout = params.dropout;
    const uint64_t seed = dropout.slot[0];
    const auto offset = static_cast<uint32_t>(dropout.slot[1]);
    const uint32_t row = dropout.first_row + row0, group = (dropout.first_col + col0) / kDropoutLanesPerDraw;
    const uint32_t two_thresholds = dropout.threshold * 0x00010001u;
#pragma unroll 1
    for (int i = thread(); i < Tile::kRows * kWords; i += kHelpers) {
      uint32_t bits = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        PhiloxDraw draw[2];
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          draw[g] = {{row + i / kWords, group + i % kWords * 4 + half * 2 + g, offset, dropout.site}};
        }
        philox4x32_10(draw, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
        bits += (dropped(draw[0], two_thresholds) + (dropped(draw[1], two_thresholds) << dropped_shift(1)))
                << dropped_shift(half * 2);
      }
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + Tile::kOffsetMask + i * 4), "r"(bits) : "memory");
    }
  }

  __device__ void serve(Extras<Tile, kRankStep> extras) const {
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      const int row0 = tiles.row(), col0 = tiles.col();
      for (int time = 0; time < extras.times(); ++time) {
        for (int step = 0; step < extras.steps; ++step, extras.advance()) {
          wait_for(extras.empty, extras.round ^ 1);
          fetch_rows(base + Tile::kOffsetU, params.u, false, Tile::kRows, row0, params.rows, step * kRankStep);
          if constexpr (Tile::kLinear) {
            fetch_rows(base + Tile::kOffsetV, params.v, params.v_dtype == FloatType::kFloat32, Tile::kCols, col0,
                       params.cols, step * kRankStep);
            if (time + step == 0) fetch_scales(col0);
          } else {
            fetch_columns(col0, step * kRankStep);
            if (params.dropout.threshold > 0 && time + step == 0) {
              params.dropped == nullptr ? draw_mask(row0, col0) : fetch_mask(row0, col0);
            }
          }
          wait_for_copies();
          fence_for_async();
          arrive(extras.full);
        }
      }
    }
  }
};

template <typename Tile>
__device__ void bring_operands(const Fp8GemmParams& params, const CUtensorMap& left, const CUtensorMap& right,
                               uint32_t base) {
  TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
  for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
    const int row = tiles.row(), col = tiles.col();
    for (int at = 0; at < static_cast<int>(params.depth); at += kStepDepth, ring.advance()) {
      wait_for(ring.empty(), ring.round ^ 1);
      arrive_and_expect(ring.full(), Tile::kStageBytes);
      copy_box(ring.tile(), left, at, row, ring.full());
      copy_box(ring.tile() + Tile::kBytesLeft, right, at, col, ring.full());
    }
  }
}

template <typename T, bool kE5M2, bool kSplits, typename Tile, int kRankStep>
struct Consumer {
  using RowsOfU = SwizzledRows<kRankStep * 2>;
  static constexpr int kBlocks = Tile::kBlocks, kSums = kBlockRows * kBlockCols / 128;
  const Fp8GemmParams& params;
  uint32_t base;
  int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
  int lane = threadIdx.x % 32;
  int residuals = 0;  // taken, modulo 2
  float sum[kBlocks][kSums];
  float part[kSums];  // of 128 along depth; later u v, and what is stored

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

  static __device__ void clear(float (&sums)[kSums]) {
#pragma unroll
    for (float& each : sums) each = 0.0f;
  }

  // What follows reads the sums after the tensor cores have written them.
  static __device__ void settle(float (&sums)[kSums]) {
#pragma unroll
    for (float& each : sums) asm volatile("" : "+f"(each)::"memory");
  }

  // Of 128 along depth.
  __device__ void multiply(float (&to)[kSums], uint32_t tile, int block, bool add) const {
    const uint64_t a = Rows::descriptor(tile + Tile::block_row(group, block) * kStepDepth);
    const uint64_t b = Rows::descriptor(tile + Tile::kBytesLeft + Tile::block_col(block) * kStepDepth);
#pragma unroll
    for (int i = 0; i < kStepDepth / 32; ++i) wgmma_fp8<kE5M2>(to, moved(a, i * 32), moved(b, i * 32), add || i > 0);
  }

  // Of both blocks of a wide tile.
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

  // part = u v of a block. With one step, both stay for the tile's other blocks.
  __device__ void multiply_factors(Extras<Tile, kRankStep>& extras, int block) {
    clear(part);
    const uint64_t u = RowsOfU::descriptor(base + Tile::kOffsetU + Tile::block_row(group, block) * (kRankStep * 2));
    const uint32_t v_block = base + Tile::kOffsetV + Tile::block_col(block) * (kRankStep * 2);
    const uint64_t v = Tile::kLinear ? RowsOfU::descriptor(v_block) : Rows::descriptor(v_block, kRankStep * 128);
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

  // The residual of the block at (row, col), to where the block itself will be stored from.
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
        uint32_t word;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
        const float2 two = unpacked<T>(word);
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
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(mask[0]), "=r"(mask[1]), "=r"(mask[2]), "=r"(mask[3])
                   : "r"(address));
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

  // A warp's 16 rows of `part`, rounded.
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

template <Product kProduct, typename T, bool kE5M2, bool kSplits, Shape kShape, int kRankStep>
__global__ void __launch_bounds__(Tiling<kProduct, kShape, kRankStep>::kThreads, 1)
    fp8_gemm_kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
                    const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap residual,
                    const __grid_constant__ Fp8GemmParams params) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = Tiling<kProduct, kShape, kRankStep>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared), barriers = base + Tile::kOffsetBarriers;
  if (threadIdx.x == 0) {
    TileRing<Tile::kStages, Tile::kStageBytes> ring(base, barriers);
    for (; ring.round == 0; ring.advance()) {
      init_barrier(ring.full(), 1);
      init_barrier(ring.empty(), Tile::kConsumers * 4);
    }
    init_barrier(barriers + Tile::kExtras * 8, kHelpers);
    init_barrier(barriers + Tile::kExtras * 8 + 8, Tile::kConsumers * 128);
    for (int i = 0; Tile::kLinear && i < Tile::kConsumers * 4; ++i) {
      init_barrier(barriers + (Tile::kResiduals + i) * 8, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  begin_after_previous_kernel();
  const Extras<Tile, kRankStep> extras(barriers + Tile::kExtras * 8, params);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    if (threadIdx.x == 0) {
      bring_operands<Tile>(params, left, right, base);
    } else if (threadIdx.x >= 32 && extras.any) {
      Helper<T, Tile, kRankStep>(params, base).serve(extras);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kConsumerRegisters));
    Consumer<T, kE5M2, kSplits, Tile, kRankStep>(params, base).work(out, residual, extras);
  }
#endif
}

template <Product kProduct, typename T, bool kE5M2, bool kSplits, Shape kShape, int kRankStep>
void launch(const Fp8GemmParams& params, cudaStream_t stream) {
  using Tile = Tiling<kProduct, kShape, kRankStep>;
  const auto kernel = fp8_gemm_kernel<kProduct, T, kE5M2, kSplits, kShape, kRankStep>;
  LORAKERNELS_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes));
  const int64_t tiles =
      static_cast<int64_t>(Tiles<Tile>::count(params.rows, Tile::kRows)) * Tiles<Tile>::count(params.cols, Tile::kCols);
  const auto blocks = static_cast<unsigned>(std::min(tiles, params.multiprocessors));
  const auto operand = [&](const void* data, int64_t rows, int box_rows) {
    return tensor_map(data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, params.depth, box_rows);
  };
  constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto result = [&](const void* data) {
    return data == nullptr ? CUtensorMap{} : tensor_map(data, kType, 2, params.rows, params.cols, kBoxRows);
  };
  launch_kernel(kernel, blocks, Tile::kThreads, Tile::kBytes, stream, true,
                operand(params.left, params.rows, Tile::kRows), operand(params.right, params.cols, Tile::kCols),
                result(params.out), result(params.residual), params);
}

template <Product kProduct, typename T, bool kE5M2, bool kSplits>
void launch_tiled(const Fp8GemmParams& params, cudaStream_t stream) {
  const auto large = [&](auto shape) {
    constexpr Shape kShape = decltype(shape)::value;
    params.rank <= 16 ? launch<kProduct, T, kE5M2, kSplits, kShape, 16>(params, stream)
                      : launch<kProduct, T, kE5M2, kSplits, kShape, 32>(params, stream);
  };
  if (params.tile_rows * params.tile_cols == 128 * 128) {
    launch<kProduct, T, kE5M2, kSplits, Shape::kSmall, 64>(params, stream);
  } else if constexpr (!kSplits) {
    large(std::integral_constant<Shape, Shape::kWide>());
  } else if (params.tile_rows == 192) {
    large(std::integral_constant<Shape, Shape::kTall>());
  } else {
    large(std::integral_constant<Shape, Shape::kTallest>());
  }
}

template <Product kProduct, typename T, bool kE5M2>
void launch_split_or_not(const Fp8GemmParams& params, cudaStream_t stream) {
  params.splits ? launch_tiled<kProduct, T, kE5M2, true>(params, stream)
                : launch_tiled<kProduct, T, kE5M2, false>(params, stream);
}

}  // namespace
}  // namespace lorakernels
