// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the warpgroups of a block of quantize_grad_kernel, its shared memory, and what fills that.
#pragma once

#include "device/factor.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/mbarrier.h"
#include "device/ptx/shared_memory.h"
#include "device/ptx/threads.h"
#include "device/ptx/tma.h"
#include "device/ptx/wgmma.h"
#include "device/tile_ring.h"
#include "ops/quantize_grad/params.h"

namespace lorakernels {
namespace {

using Grid = QuantizeGradGrid;

constexpr int kGroups = 2;                   // warpgroups that multiply
constexpr int kMultiplying = 128 * kGroups;  // threads

// What a block's warpgroups do. The first two multiply, the next ones make dy8, and the last ones draw the mask, so
// that each waits for what it needs alone. At rank 0 nobody multiplies. Unless `kMakesApart`, those that multiply make
// dy8 as well. In strips of one tile nobody needs more registers than others.
template <int kRank, int kSteps, bool kDraws, bool kMakesApart>
struct Roles {
  static constexpr bool kApart = kMakesApart;
  static constexpr int kMultipliers = kRank > 0 ? kGroups : 0;
  static constexpr int kQuantizers = !kApart ? 0 : kRank == 0 ? 4 : kRank > 16 && kDraws ? 1 : 2;
  static constexpr int kDrawers = kDraws ? 1 : 0;
  static constexpr int kCount = kMultipliers + kQuantizers + kDrawers, kThreads = 128 * kCount;
  static constexpr int kFirstQuantizer = 128 * kMultipliers, kFirstDrawer = kFirstQuantizer + 128 * kQuantizers;
  static constexpr int kQuantizingWarps = 4 * (kApart ? kQuantizers : kMultipliers);

  // Registers of a thread: at launch, then of those that multiply, and of the others.
  static constexpr int kAtLaunch = registers_of_warpgroups<kCount>() / kCount;
  static constexpr int kOfWideStrips = kRank == 64 ? (kApart ? 200 : 216) : kRank == 32 && kDraws ? 144 : kAtLaunch;
  static constexpr int kWanted = kSteps == 1 ? kAtLaunch : kOfWideStrips;
  static constexpr bool kShifts = kWanted > kAtLaunch;
  static constexpr int kLeft =
      kShifts ? (kCount * kAtLaunch - kMultipliers * kWanted) / (kCount - kMultipliers) / 8 * 8 : kAtLaunch;
  static_assert(kMultipliers * kWanted + (kCount - kMultipliers) * kLeft <= kCount * kAtLaunch,
                "a block has no more registers at launch, and setmaxnreg would wait for more for ever");
  static constexpr bool kHelp = kDraws && kLeft > 64;  // whoever is done draws; 56 registers would be too few
};

constexpr int kAtom = 64;  // rows and columns of a matrix of 128-byte rows
constexpr int kAtomBytes = kAtom * 128;
constexpr int kStageBytes = 4 * kAtomBytes;
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
  // A step takes 128 rows and 64 kAcross columns. Its stages lie one below the other, with kRows rows each, as atoms.
  // The atoms of the leftmost 64 columns are first. What lies side by side in device memory is asked for together.
  static constexpr int kStagesOfStep = kSteps == 4 && kRank <= 32 ? 2 : 1;
  static constexpr int kAcross = 2 * kStagesOfStep;
  static constexpr int kRows = kPanelRows / kStagesOfStep;
  static constexpr int kColBytes = kRows * 128;  // of a stage: from one 64 columns to the next
  static constexpr int kStepCols = kAtom * kAcross;
  static constexpr int kStepsOfStrip = kStripCols / kStepCols;
  // Strips of one tile are for few tiles a block. Then a block of the next kernel fits beside it.
  static constexpr int kStages = kSteps == 1 ? 3 : kRank <= 16 ? 6 : kRank == 32 ? 5 : kRank == 64 ? 4 : 3;
  static constexpr int kFactorBytes = kPanelRows * kRank * 2;  // of s; B's is kSteps times that
  static constexpr int kOffsetB = kStages * kStageBytes;
  static constexpr int kOffsetS = kOffsetB + kSteps * kFactorBytes;
  static constexpr int kOffsetBarriers = kOffsetS + 2 * kFactorBytes;     // first the full ones, then the empty ones
  static constexpr int kOffsetDrawn = kOffsetBarriers + 2 * kStages * 8;  // how many units of the mask were taken
  static constexpr int kOffsetMost = kOffsetDrawn + 4;                    // the largest magnitude of the block's dy
  static constexpr int kBytes = kOffsetMost + 4;
  static_assert(kBytes <= 227 * 1024);
};

template <typename Tile>
using RingOf = TileRing<Tile::kStages, kStageBytes>;

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

// One thread starts the copies of dy's tiles, as far ahead of their use as the ring has stages.
template <typename Tile>
struct Producer {
  Cursor at;
  RingOf<Tile> ring;
  int col = 0, row = 0;  // in the strip and in the panel

  __device__ Producer(const Cursor& first, const RingOf<Tile>& ring) : at(first), ring(ring) {}

  // Leaves out a tile that another thread brings.
  __device__ void skip() {
    if (at.left == 0) return;
    ring.advance();
    row += Tile::kRows;
    if (row == kPanelRows) row = 0, col += Tile::kStepCols;
    if (col == Tile::kStripCols) col = 0, at.advance();
  }

  // Waits until all warps have used the tile that the stage holds. Whole warps call it, with that of the thread
  // `leader`.
  __device__ void bring(const CUtensorMap& dy, uint32_t leader) {
    if (at.left == 0) return;
    if (threadIdx.x == leader) {
      wait_for(ring.empty(), ring.round ^ 1);
      arrive_and_expect(ring.full(), kStageBytes);
      const uint64_t policy = evict_first_policy();
#pragma unroll
      for (int i = 0; i < Tile::kAcross; ++i) {
        copy_box(ring.tile() + i * Tile::kColBytes, dy, at.strip * Tile::kStripCols + col + i * kAtom,
                 at.panel * kPanelRows + row, ring.full(), policy);
      }
    }
    __syncwarp();
    skip();
  }
};

// How many stages are filled at once, by the first thread that quantizes where those do not multiply.
template <typename Tile>
constexpr int kFilledStages = Tile::kStages - Tile::kStagesOfStep;

template <typename T, int kRank, typename Tile>
__device__ void load_panel_of_s(const QuantizeGradParams& params, uint32_t base, const Cursor& at) {
  using Rows = Factor<kRank>;
  const uint32_t to = base + Tile::kOffsetS + at.count % 2 * Tile::kFactorBytes;
  const auto& projections = params.projections;
  const int window = projections.window[projections.of(at.strip * Tile::kStripCols)];
  const bool there = window >= 0 && params.s != nullptr;
  const FactorSource source(there ? static_cast<const T*>(params.s) + window : nullptr, params.rows, params.rank,
                            projections.pitch, params.dtype);
#pragma unroll
  for (int i = threadIdx.x; i < kPanelRows * Rows::kChunks; i += kMultiplying) {
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

// Asks the L2 cache for the first of both, before the previous kernel has ended. One thread calls it.
template <typename Tile>
__device__ void prefetch_factors(const QuantizeGradParams& params, const Cursor& first) {
  if (first.left == 0) return;
  const int64_t col = static_cast<int64_t>(first.strip) * Tile::kStripCols;
  const int64_t row = static_cast<int64_t>(first.panel) * kPanelRows;
  const int64_t bytes_of_B = params.rank * (params.b_dtype == FloatType::kFloat32 ? 4 : 2);
  const int64_t bytes_of_s = params.projections.pitch * 2;
  prefetch_bytes(static_cast<const uint8_t*>(params.B) + col * bytes_of_B,
                 min(params.cols - col, int64_t{Tile::kStripCols}) * bytes_of_B);
  if (params.s == nullptr) return;
  prefetch_bytes(static_cast<const uint8_t*>(params.s) + row * bytes_of_s,
                 min(params.rows - row, int64_t{kPanelRows}) * bytes_of_s);
}

template <typename T, int kRank, typename Tile>
__device__ void load_strip_of_B(const QuantizeGradParams& params, uint32_t base, int strip) {
  using Rows = Factor<kRank>;
  constexpr int kCols = Tile::kStripCols;
  const auto& projections = params.projections;
  const bool there = projections.window[projections.of(strip * kCols)] >= 0;
  const FactorSource source(there ? params.B : nullptr, params.cols, params.rank, params.rank, params.b_dtype);
  const int64_t first_row = static_cast<int64_t>(strip) * kCols;
  const auto address = [&](int i) {
    return base + Tile::kOffsetB + Rows::offset(i / Rows::kChunks, i % Rows::kChunks, kCols);
  };
  constexpr int kCount = kCols * Rows::kChunks / kMultiplying;
  if (!source.in_chunks || source.dtype != FloatType::kFloat32) {
    const bool as_it_is = source.in_chunks && source.dtype == params.dtype;
#pragma unroll 1
    for (int i = threadIdx.x; i < kCount * kMultiplying; i += kMultiplying) {
      const int64_t row = first_row + i / Rows::kChunks;
      const int chunk = i % Rows::kChunks;
      if (as_it_is) {
        copy_async(address(i), source.chunk_at(row, chunk), source.has(row, chunk));
      } else {
        store_shared(address(i), source.rounded<T>(row, chunk));
      }
    }
    return;
  }
  constexpr int kAtOnce = kCount < 4 ? kCount : kRank == 32 ? 2 : 4;  // as registers allow
#pragma unroll 1
  for (int i = threadIdx.x; i < kCount * kMultiplying; i += kAtOnce * kMultiplying) {
    float4 low[kAtOnce], high[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t row = first_row + (i + j * kMultiplying) / Rows::kChunks;
      const int chunk = (i + j * kMultiplying) % Rows::kChunks;
      low[j] = high[j] = float4{};
      if (!source.has(row, chunk)) continue;
      const auto from = static_cast<const float4*>(source.chunk_at(row, chunk));
      low[j] = from[0], high[j] = from[1];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float4 &a = low[j], &b = high[j];
      store_shared(address(i + j * kMultiplying),
                   make_uint4(packed<T>(a.x, a.y), packed<T>(a.z, a.w), packed<T>(b.x, b.y), packed<T>(b.z, b.w)));
    }
  }
}

}  // namespace
}  // namespace lorakernels
