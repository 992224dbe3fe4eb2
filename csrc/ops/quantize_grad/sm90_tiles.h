// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the shared memory of a block of quantize_grad_kernel, what fills it, and how dy8 is made from it.
#pragma once

#include <cuda_fp8.h>

#include "device/factor.h"
#include "device/pairs.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/mbarrier.h"
#include "device/ptx/shared_memory.h"
#include "device/ptx/tma.h"
#include "device/ptx/wgmma.h"
#include "device/tile_ring.h"
#include "ops/amax/device.h"
#include "ops/quantize_grad/params.h"

namespace lorakernels {
namespace {

using Grid = QuantizeGradGrid;

constexpr int kGroups = 2;  // warpgroups of a block
constexpr int kThreads = 128 * kGroups;
template <bool kDraws>
constexpr int kThreadsOf = kThreads + (kDraws ? 128 : 0);  // one more warpgroup draws the mask
constexpr int kRegistersOfWorker = 216, kRegistersOfDrawer = 72;
static_assert(kGroups * kRegistersOfWorker + kRegistersOfDrawer <= (kGroups + 1) * 168,
              "a block has no more registers at launch, and setmaxnreg would wait for more for ever");
constexpr int kAtom = 64;  // rows and columns of a matrix of 128-byte rows
constexpr int kAtomBytes = kAtom * 128;
constexpr int kStageBytes = 4 * kAtomBytes;  // a tile of 128 × 128 as [column half][row half] atoms
constexpr int kPanelRows = Grid::kPanelRows;
constexpr int kTileCols = Grid::kTileCols;
static_assert(kPanelRows == kGroups * kAtom && kTileCols == kGroups * kAtom);

using DyRows = SwizzledRows<128>;

// B and s in shared memory: rows of kRank elements. Rows above 128 bytes are cut, and the pieces of all rows lie
// together.
template <int kRank>
struct Factor {
  using Rows = SwizzledRows < kRank<64 ? kRank * 2 : 128>;
  static constexpr int kChunks = kRank / 8;

  static __device__ uint32_t offset(uint32_t row, uint32_t chunk, uint32_t rows) {
    return chunk / 8 * rows * 128 + Rows::offset(row, chunk % 8);
  }
  static __device__ uint64_t descriptor(uint32_t base, uint32_t rows) { return Rows::descriptor(base, rows * 128); }
  static constexpr uint32_t kBytesOf16Rows = Rows::offset(16, 0);
};

template <int kRank, int kTilesOfStrip>
struct Tiling {
  static constexpr int kSteps = kTilesOfStrip;
  static constexpr int kStripCols = kSteps * kTileCols;
  static constexpr int kStages = kRank <= 32 ? 5 : kRank == 64 ? 4 : 3;
  static constexpr int kFactorBytes = kPanelRows * kRank * 2;  // of s; B's is kSteps times that
  static constexpr int kOffsetB = kStages * kStageBytes;
  static constexpr int kOffsetS = kOffsetB + kSteps * kFactorBytes;
  static constexpr int kOffsetBarriers = kOffsetS + 2 * kFactorBytes;     // first the full ones, then the empty ones
  static constexpr int kOffsetDrawn = kOffsetBarriers + 2 * kStages * 8;  // how many units of the mask were taken
  static constexpr int kBytes = kOffsetDrawn + 4;
  static_assert(kBytes <= 227 * 1024);
};

template <__nv_fp8_interpretation_t kFormat>
__device__ uint32_t fp8_of_two(float2 value, float scale) {
  return __nv_cvt_float2_to_fp8x2({value.x * scale, value.y * scale}, __NV_SATFINITE, kFormat);
}

template <typename T, __nv_fp8_interpretation_t kFormat>
__device__ uint2 fp8_of_eight(const uint4& words, float scale) {
  const auto four = [&](uint32_t low, uint32_t high) {
    return fp8_of_two<kFormat>(unpacked<T>(low), scale) | fp8_of_two<kFormat>(unpacked<T>(high), scale) << 16;
  };
  return {four(words.x, words.y), four(words.z, words.w)};
}

// Raises *amax. Non-negative floats compare like their bits as integers, and NaN is then above inf.
template <typename T>
__device__ void raise_amax(float* amax, uint32_t most) {
  most = warp_max_magnitude(most);
  if (threadIdx.x % 32 != 0 || most == 0) return;
  atomicMax(reinterpret_cast<int*>(amax), __float_as_int(unpacked<T>(most).x));
}

// Walks over a block's run of (strip, panel) pairs.
struct Cursor {
  int strip, panel;
  int panels, left;
  int count = 0;  // pairs before this one

  __device__ explicit Cursor(const Grid& grid) : strip(0), panel(0), panels(static_cast<int>(grid.panels)) {
    const int64_t first = grid.first_pair(blockIdx.x);
    left = static_cast<int>(grid.first_pair(blockIdx.x + 1) - first);
    if (left > 0) strip = static_cast<int>(first / panels), panel = static_cast<int>(first % panels);
  }

  __device__ void advance() {
    --left, ++count;
    if (++panel == panels) panel = 0, ++strip;
  }
};

// Thread 0 starts the copies of dy's tiles, one less than the ring has stages ahead of their use.
template <typename Tile>
struct Producer {
  Cursor at;
  TileRing<Tile::kStages, kStageBytes> ring;
  int step = 0;

  __device__ Producer(const Cursor& first, const TileRing<Tile::kStages, kStageBytes>& ring) : at(first), ring(ring) {}

  // Waits until all warps have used the tile that the stage holds.
  __device__ void bring(const CUtensorMap& dy) {
    if (at.left == 0) return;
    if (threadIdx.x == 0) {
      wait_for(ring.empty(), ring.round ^ 1);
      arrive_and_expect(ring.full(), kStageBytes);
      const uint64_t policy = evict_first_policy();
      const int col = at.strip * Tile::kStripCols + step * kTileCols, row = at.panel * kPanelRows;
      copy_box(ring.tile(), dy, col, row, ring.full(), policy);
      copy_box(ring.tile() + 2 * kAtomBytes, dy, col + kAtom, row, ring.full(), policy);
    }
    __syncwarp();
    ring.advance();
    if (++step == Tile::kSteps) step = 0, at.advance();
  }
};

template <typename T, int kRank, typename Tile>
__device__ void load_panel_of_s(const QuantizeGradParams& params, uint32_t base, const Cursor& at) {
  using Rows = Factor<kRank>;
  const uint32_t to = base + Tile::kOffsetS + at.count % 2 * Tile::kFactorBytes;
  const auto& projections = params.projections;
  const int window = projections.window[projections.of(static_cast<int64_t>(at.strip) * Tile::kStripCols)];
  const bool there = window >= 0 && params.s != nullptr;
  const FactorSource source(there ? static_cast<const T*>(params.s) + window : nullptr, params.rows, params.rank,
                            projections.pitch, params.dtype);
#pragma unroll
  for (int i = threadIdx.x; i < kPanelRows * Rows::kChunks; i += kThreads) {
    const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
    const int64_t source_row = static_cast<int64_t>(at.panel) * kPanelRows + row;
    const uint32_t address = to + Rows::offset(row, chunk, kPanelRows);
    if (source.in_chunks) {
      copy_async(address, source.chunk_at(source_row, chunk), source.has(source_row, chunk));
    } else {
      store_shared(address, source.rounded<T>(source_row, chunk));
    }
  }
}

template <typename T, int kRank, typename Tile>
__device__ void load_strip_of_B(const QuantizeGradParams& params, uint32_t base, int strip) {
  using Rows = Factor<kRank>;
  constexpr int kCols = Tile::kStripCols;
  const auto& projections = params.projections;
  const bool there = projections.window[projections.of(static_cast<int64_t>(strip) * kCols)] >= 0;
  const FactorSource source(there ? params.B : nullptr, params.cols, params.rank, params.rank, params.b_dtype);
#pragma unroll 4
  for (int i = threadIdx.x; i < kCols * Rows::kChunks; i += kThreads) {
    const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
    const uint4 rounded = source.rounded<T>(static_cast<int64_t>(strip) * kCols + row, chunk);
    store_shared(base + Tile::kOffsetB + Rows::offset(row, chunk, kCols), rounded);
  }
}

// Makes dy8 of this warpgroup's half of a tile, 16 neighbouring elements of a thread at a time, and raises `most`.
template <typename T, int kBatch>
struct Quantizer {
  float scale;
  uint32_t most = 0;
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // of the tile
  int col = threadIdx.x % 4 * 16;
  uint32_t source = threadIdx.x / 128 * kAtomBytes + DyRows::offset(row % kAtom, threadIdx.x % 4 * 2);  // of the tile

  __device__ explicit Quantizer(float scale) : scale(scale) {}

  template <__nv_fp8_interpretation_t kFormat>
  __device__ void tile(const QuantizeGradParams& params, const uint8_t* tile, int64_t first_row, int64_t first_col) {
    const bool wide = params.cols % 16 == 0;
    uint8_t* const target = params.dy8 + (first_row + row) * params.cols + first_col + col;
    const int64_t rows = params.rows - first_row - row, cols = params.cols - first_col - col;
#pragma unroll
    for (int first = 0; first < 4; first += kBatch) {
      uint4 low[kBatch], high[kBatch];
#pragma unroll
      for (int i = first; i < first + kBatch; ++i) {
        const uint32_t at = source + i / 2 * (8 * 128) + i % 2 * (2 * kAtomBytes);
        low[i - first] = *reinterpret_cast<const uint4*>(tile + at);
        high[i - first] = *reinterpret_cast<const uint4*>(tile + (at ^ 16));
      }
#pragma unroll
      for (int i = first; i < first + kBatch; ++i) {
        const uint4 &l = low[i - first], &h = high[i - first];
        for (const uint32_t word : {l.x, l.y, l.z, l.w, h.x, h.y, h.z, h.w}) most = max_magnitude(most, word);
        const uint2 a = fp8_of_eight<T, kFormat>(l, scale), b = fp8_of_eight<T, kFormat>(h, scale);
        uint8_t* const to = target + i / 2 * 8 * params.cols + i % 2 * kAtom;
        const bool inside = i / 2 * 8 < rows && i % 2 * kAtom < cols;
        if (inside && wide) __stwb(reinterpret_cast<uint4*>(to), make_uint4(a.x, a.y, b.x, b.y));
        if (inside && !wide) __stwb(reinterpret_cast<uint2*>(to), a);
        if (inside && !wide && i % 2 * kAtom + 8 < cols) __stwb(reinterpret_cast<uint2*>(to + 8), b);
      }
    }
  }
};

}  // namespace
}  // namespace lorakernels
