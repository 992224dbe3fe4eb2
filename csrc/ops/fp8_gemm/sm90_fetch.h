// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the warpgroup of sm90_kernel.h that fetches what the other warpgroups multiply.
#pragma once

#include "device/pairs.h"
#include "device/ptx/cp_async.h"
#include "ops/fp8_gemm/sm90_tiles.h"

namespace lorakernels {
namespace {

// Which of a draw's 8 columns are dropped: bit 2 w for column 2 w, bit 16 + 2 w for column 2 w + 1. A 16-bit lane is
// below the threshold if max(lane, threshold) differs from the lane.
__device__ uint32_t dropped(const PhiloxDraw& draw, uint32_t two_thresholds) {
  uint32_t bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    bits += __vminu2(draw.word[w] ^ __vmaxu2(draw.word[w], two_thresholds), 0x00010001u) << (2 * w);
  }
  return bits;
}

template <typename T, typename Tile, int kRankStep>
struct Helper {
  using RowsOfU = SwizzledRows<kRankStep * 2>;
  const Fp8GemmParams& params;
  uint32_t base;

  __device__ Helper(const Fp8GemmParams& params, uint32_t base) : params(params), base(base) {}

  static __device__ int thread() { return threadIdx.x - 32; }

  // Fetches `count` rows of kRankStep elements, from (row0, rank0) of a matrix whose rows have u_stride elements.
  __device__ void fetch_rows(uint32_t to, const void* matrix, bool is_fp32, int count, int row0, int64_t rows,
                             int rank0) const {
    constexpr int kChunks = kRankStep / 8;
    fetch_eights(count * kChunks, matrix, is_fp32, [&](int i) {
      const int64_t row = row0 + i / kChunks, col = rank0 + i % kChunks * 8;
      return Eight{to + RowsOfU::offset(i / kChunks, i % kChunks), row * params.u_stride + col,
                   row < rows && col < params.u_stride && params.rank > 0};
    });
  }

  // v of a group.
  __device__ const void* v_of(int group) const {
    if constexpr (!Tile::kGrouped) return params.v;
    const int64_t elements = Tile::kLinear ? params.cols * params.u_stride : params.rank * params.cols;
    const int64_t bytes = params.v_dtype == FloatType::kFloat32 ? 4 : 2;
    return static_cast<const uint8_t*>(params.v) + group * elements * bytes;
  }

  // Fetches columns of v as [column half][kRankStep] rows of 128 bytes.
  __device__ void fetch_columns(const void* v, int col0, int rank0) const {
    constexpr int kChunks = Tile::kCols / 8;
    fetch_eights(kRankStep * kChunks, v, params.v_dtype == FloatType::kFloat32, [&](int i) {
      const int row = i / kChunks, chunk = i % kChunks;
      return Eight{base + Tile::kOffsetV + chunk / 8 * (kRankStep * 128) + Rows::offset(row, chunk % 8),
                   (rank0 + row) * params.cols + col0 + chunk * 8,
                   rank0 + row < params.rank && col0 + chunk * 8 < params.cols};
    });
  }

  // The same for kGradInputUntransposed. Of each 16 columns the 8 even ones come first, then the odd ones. This is the
  // order in which sm90_untransposed.h has the rows of W8ᵀ.
  __device__ void fetch_permuted_columns(const void* v, int col0, int rank0) const {
    constexpr int kSixteens = Tile::kCols / 16;
#pragma unroll 1
    for (int i = thread(); i < kRankStep * kSixteens; i += kHelpers) {
      const int row = i / kSixteens, at = i % kSixteens, col = col0 + at * 16;
      uint32_t word[8]{};  // two columns each
      if (rank0 + row < params.rank && col < params.cols) {
        const int64_t from = (rank0 + row) * params.cols + col;
        if (params.v_dtype == FloatType::kFloat32) {
          const auto source = reinterpret_cast<const float4*>(static_cast<const float*>(v) + from);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float4 four = source[j];
            word[2 * j] = packed<T>(four.x, four.y), word[2 * j + 1] = packed<T>(four.z, four.w);
          }
        } else {
          const auto source = reinterpret_cast<const uint4*>(static_cast<const T*>(v) + from);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 eight = source[j];
            word[4 * j] = eight.x, word[4 * j + 1] = eight.y, word[4 * j + 2] = eight.z, word[4 * j + 3] = eight.w;
          }
        }
      }
      const uint32_t to = base + Tile::kOffsetV + at / 4 * (kRankStep * 128);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const auto half = [&](int j) { return __byte_perm(word[2 * j], word[2 * j + 1], odd ? 0x7632 : 0x5410); };
        store_shared(to + Rows::offset(row, at % 4 * 2 + odd), make_uint4(half(0), half(1), half(2), half(3)));
      }
    }
  }

  // Eight elements: where in shared memory, from which of a matrix, and whether these exist. Else they are zeros.
  struct Eight {
    uint32_t to;
    int64_t from;
    bool exists;
  };

  // Fetches `count` times eight elements of a matrix; place(i) is an Eight. What is rounded goes through registers.
  // Then several are loaded before the first is stored, as each waits for the memory.
  template <typename Place>
  __device__ void fetch_eights(int count, const void* matrix, bool is_fp32, const Place& place) const {
    if (!is_fp32) {
#pragma unroll 1
      for (int i = thread(); i < count; i += kHelpers) {
        const Eight at = place(i);
        copy_async(at.to, static_cast<const T*>(matrix) + (at.exists ? at.from : 0), at.exists);
      }
      return;
    }
    constexpr int kAtOnce = Tile::kScaledBlocks ? 2 : 1;  // others have no registers for more
#pragma unroll 1
    for (int i = thread(); i < count; i += kAtOnce * kHelpers) {
      float4 low[kAtOnce]{}, high[kAtOnce]{};
      uint32_t to[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const Eight at = place(i + j * kHelpers);
        to[j] = at.to;
        if ((kAtOnce == 1 || i + j * kHelpers < count) && at.exists) {
          const auto source = reinterpret_cast<const float4*>(static_cast<const float*>(matrix) + at.from);
          low[j] = source[0], high[j] = source[1];
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (kAtOnce > 1 && i + j * kHelpers >= count) continue;
        store_shared(to[j], make_uint4(packed<T>(low[j].x, low[j].y), packed<T>(low[j].z, low[j].w),
                                       packed<T>(high[j].x, high[j].y), packed<T>(high[j].z, high[j].w)));
      }
    }
  }

  __device__ void fetch_scales(int col0, int group) const {
    const float scale = Tile::kScaledBlocks ? 0.0f : params.left_scale_inv[group];  // blocks are scaled as summed
#pragma unroll 1
    for (int i = thread(); i < Tile::kCols; i += kHelpers) {
      const bool exists = col0 + i < params.cols;
      const int64_t col = exists ? col0 + i : 0;
      const float bias = params.bias == nullptr ? 0.0f : as_float(params.bias, col, params.bias_dtype);
      if constexpr (!Tile::kScaledBlocks) {
        store_float(base + Tile::kOffsetScales + i * 4, scale * params.right_scale_inv[params.by_column ? col : group]);
      }
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

  // Draws the tile's mask as bits, laid out as device/dropout.h says.
  __device__ void draw_mask(int row0, int col0) const {
    constexpr int kWords = Tile::kMaskBytes / 4;
    const DropoutParams& dropout = params.dropout;
    const uint64_t seed = dropout.slot[0];
    const auto offset = static_cast<uint32_t>(dropout.slot[1]);
    const uint32_t group = (dropout.first_col + col0) / kDropoutLanesPerDraw;
    const uint32_t two_thresholds = dropout.threshold * 0x00010001u;
#pragma unroll 1
    for (int i = thread(); i < Tile::kRows * kWords; i += kHelpers) {
      const uint32_t row = dropout.rows(row0 + i / kWords);
      uint32_t bits = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        PhiloxDraw draw[2];
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          draw[g] = {{row, group + i % kWords * 4 + half * 2 + g, offset, dropout.site}};
        }
        philox4x32_10(draw, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
        bits += (dropped(draw[0], two_thresholds) + (dropped(draw[1], two_thresholds) << dropped_shift(1)))
                << dropped_shift(half * 2);
      }
      store_shared(base + Tile::kOffsetMask + i * 4, bits);
    }
  }

  __device__ void fetch_tiles(Extras<Tile, kRankStep> extras) const {
    for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
      const int row0 = tiles.row(), col0 = tiles.col(), group = tiles.group(params);
      if (Tile::kGrouped && group < 0) continue;
      const void* v = v_of(group);
      extras.begin(params, col0);
      for (int time = 0; time < extras.times; ++time) {
        for (int step = 0; step < extras.steps; ++step, extras.advance()) {
          wait_for(extras.empty, extras.round ^ 1);
          const int rank0 = (extras.first + step) * kRankStep;
          fetch_rows(base + Tile::kOffsetU, params.u, false, Tile::kRows, row0, params.rows, rank0);
          if constexpr (Tile::kLinear) {
            const int count = Tile::kCols / extras.times, at = time * count;  // the piece of the tile that comes next
            fetch_rows(base + Tile::kOffsetV + at * (kRankStep * 2), v, params.v_dtype == FloatType::kFloat32, count,
                       col0 + at, params.cols, rank0);
            if (time + step == 0) fetch_scales(col0, weight_of(params, group));
          } else {
            Tile::kUntransposed ? fetch_permuted_columns(v, col0, rank0) : fetch_columns(v, col0, rank0);
            if (params.dropout.threshold > 0 && time + step == 0) {
              params.dropped == nullptr ? draw_mask(row0, col0) : fetch_mask(row0, col0);
            }
          }
          wait_for_all_copies();
          fence_for_async();
          arrive(extras.full);
        }
      }
    }
  }
};

template <typename Tile, int kMultiple>
__device__ void copy_operands(const Fp8GemmParams& params, const CUtensorMap& left, const CUtensorMap& right,
                              uint32_t base) {
  TileRing<Tile::kStages, Tile::kStageBytes> ring(base, base + Tile::kOffsetBarriers);
  const int steps = count_steps<kMultiple>(params);
  for (Tiles<Tile> tiles(params); tiles.left(); tiles.advance()) {
    const int row = tiles.row(), col = tiles.col(), group = tiles.group(params);
    if (Tile::kGrouped && group < 0) continue;
    // where a group's matrix begins in right, and where all of them end
    const int first = weight_of(params, group) * static_cast<int>(Tile::kUntransposed ? params.depth : params.cols);
    const int end = static_cast<int>(weights_of(params) * params.depth);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const int at = step * kStepDepth;
      wait_for(ring.empty(), ring.round ^ 1);
      arrive_and_expect(ring.full(), Tile::kStageBytes);
      copy_box(ring.tile(), left, at, row, ring.full());
      const bool beyond = Tile::kGrouped && Tile::kUntransposed && at >= params.depth;  // zeros, not the next matrix
      copy_box(ring.tile() + Tile::kBytesLeft, right, Tile::kUntransposed ? col : at,
               beyond ? end : first + (Tile::kUntransposed ? at : col), ring.full());
    }
  }
}

}  // namespace
}  // namespace lorakernels
