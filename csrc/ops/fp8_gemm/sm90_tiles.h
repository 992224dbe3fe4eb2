// SPDX-License-Identifier: Apache-2.0
// For .cu files only: what the parts of sm90_kernel.h share, first of all the layout of a block's shared memory.
#pragma once

#include "device/ptx/mbarrier.h"
#include "device/ptx/shared_memory.h"
#include "device/ptx/tma.h"
#include "device/ptx/wgmma.h"
#include "device/tile_ring.h"
#include "ops/fp8_gemm/params.h"

namespace lorakernels {
namespace {

constexpr int kHelpers = 96;     // threads of warps 1 to 3
constexpr int kStepDepth = 128;  // elements, which are bytes, of a row of an operand's tile
constexpr int kPartSteps = 4;    // what splitting products sum in the tensor cores, before fp32 does: 512 of the depth
constexpr int kBlockRows = 64;   // with kBlockCols: what a warpgroup multiplies and stores at a time
constexpr int kBlockCols = 128;
constexpr int kBoxRows = 16;  // with 64 columns of two bytes: what a warp stores at once
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kGroup = 8;  // row tiles that share their column tiles in the L2 cache

using Rows = SwizzledRows<128>;

// kGradInput is for operands in blocks (sm90_block_kernel.h). kGradInputUntransposed computes dxᵀ = W8ᵀ dy8ᵀ. It takes
// W8 as it is stored and gives it to the tensor cores through registers.
enum class Product { kLinear, kGradInput, kGradInputUntransposed };
enum class Shape { kLow, kSmall, kTall, kTallest, kWide };  // 64 × 128, 128 × 128, 192 × 128, 256 × 128, 128 × 256

// kInGroups: a row tile multiplies the matrices of its own group.
template <Product kProduct, Shape kShape, int kRankStep, bool kInGroups = false>
struct Tiling {
  static constexpr bool kGrouped = kInGroups;
  static constexpr bool kScaledBlocks = false, kPairs = false;  // one scale for all of an operand, or for a column
  static constexpr bool kLinear = kProduct == Product::kLinear,
                        kUntransposed = kProduct == Product::kGradInputUntransposed;
  static constexpr bool kWide = kShape == Shape::kWide;
  static constexpr bool kLow = kShape == Shape::kLow;
  static constexpr int kConsumers = kLow ? 1 : kShape == Shape::kTall && !kUntransposed ? 3 : 2;  // warpgroups
  static constexpr bool kFull = kUntransposed && kShape == Shape::kTall;  // 192 sums of a thread
  static constexpr int kProducerRegisters = kFull ? 40 : 56;
  static constexpr int kConsumerRegisters = kFull ? 232 : kConsumers == 3 ? 152 : 224;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= registers_of_warpgroups<1 + kConsumers>(),
                "a block has no more registers at launch, and setmaxnreg would wait for more for ever");
  static constexpr int kBlocks = kWide ? 2 : 1;  // of a warpgroup, side by side
  static constexpr int kRows = kLow ? 64 : kShape == Shape::kTallest ? 256 : kShape == Shape::kTall ? 192 : 128;
  static constexpr int kCols = (kWide ? 2 : 1) * kBlockCols;
  static constexpr int kBytesLeft = kRows * kStepDepth, kStageBytes = kBytesLeft + kCols * kStepDepth;
  static constexpr int kStages = kLow                                        ? 7
                                 : kShape == Shape::kSmall                   ? 5
                                 : kShape == Shape::kTall && kRankStep <= 16 ? 4
                                                                             : 3;
  static constexpr int kMaskBytes = kLinear ? 0 : kCols / 8;  // of a row
  static constexpr int kOffsetOut = kStages * kStageBytes;
  // Boxes from which a warp stores a block's columns. Where a gradient has 64 ranks beside it, there is room for one.
  static constexpr int kOutBoxes = kProduct == Product::kGradInput && kWide && kRankStep == 64 ? 1 : 2;
  static constexpr int kOutBytes = kUntransposed ? 2 * kCols * 128 : kConsumers * 4 * kOutBoxes * kBoxBytes;
  static constexpr int kOffsetU = kOffsetOut + kOutBytes;
  static constexpr int kOffsetV = kOffsetU + kRows * kRankStep * 2;
  static constexpr int kOffsetMask = kOffsetV + kCols * kRankStep * 2;
  static constexpr int kOffsetScales = kOffsetMask + kRows * kMaskBytes;  // fp32 scales of the columns, then their bias
  static constexpr int kOffsetBarriers = kOffsetScales + (kLinear ? 2 * kCols * 4 : 0);
  static constexpr int kExtras = 2 * kStages,
                       kResiduals = kExtras + 2;  // barriers: the ring's, then 2, then one for each warp
  static constexpr int kBytes = kOffsetBarriers + (kResiduals + (kLinear ? kConsumers * 4 : 0)) * 8;
  static constexpr bool kFits = kBytes <= 227 * 1024;
  static_assert(!kGrouped || kRows == Fp8GemmLimits::kGroupRows);

  static __device__ int block_col(int block) { return block * kBlockCols; }
};

// The tiles that a block computes, in order. Tiles are numbered within groups of kGroup row tiles, down the rows first.
// Blocks that run at the same time therefore share their columns' operand in the L2 cache.
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
  // The group whose matrices the tile multiplies. Negative: the rows belong to no group, and the tile is passed over.
  __device__ int group(const Fp8GemmParams& params) const {
    if constexpr (!Tile::kGrouped) return 0;
    return params.segment_rows > 0 ? row() / static_cast<int>(params.segment_rows)
                                   : params.group_of[row() / Tile::kRows];
  }
};

// How many weights the groups have, and whose weight and scales a group multiplies.
inline __host__ __device__ int64_t weights_of(const Fp8GemmParams& params) {
  return params.segment_rows > 0 ? 1 : params.groups;
}
__device__ inline int weight_of(const Fp8GemmParams& params, int group) { return params.segment_rows > 0 ? 0 : group; }

// How many times kStepDepth of a tile's operands are fetched. What lies beyond the depth is zeros.
template <int kMultiple>
__device__ int count_steps(const Fp8GemmParams& params) {
  const int steps = (static_cast<int>(params.depth) + kStepDepth - 1) / kStepDepth;
  return (steps + kMultiple - 1) / kMultiple * kMultiple;
}

// A buffer with two barriers. In it the fetching warps give u, v, the mask, the scales and the bias of a tile to the
// multiplying warpgroups. If the rank needs more than one step, the buffer is filled once for each step of
// each piece of the tile. Every thread that writes arrives at `full`, every thread that reads arrives at `empty`.
template <typename Tile, int kRankStep>
struct Extras {
  uint32_t full, empty;
  int fills, first = 0;  // first: the step that a tile begins with
  int steps, times;
  bool any;
  int round = 0;

  __device__ Extras(uint32_t barriers, const Fp8GemmParams& params, int fills)
      : full(barriers),
        empty(barriers + 8),
        fills(fills),
        steps(max(1, static_cast<int>((params.rank + kRankStep - 1) / kRankStep))),
        times(steps > 1 ? fills : 1),
        any(Tile::kLinear || params.rank > 0) {}
  // The steps of a tile whose columns begin at `col`: those in which v is not zero.
  __device__ void begin(const Fp8GemmParams& params, int col) {
    if (!Tile::kLinear || params.blocks.count == 0) return;
    first = params.blocks.first_rank(col) / kRankStep;
    steps = max(1, (params.blocks.last_rank(col, Tile::kCols) + kRankStep - 1) / kRankStep - first);
    times = steps > 1 ? fills : 1;
  }
  __device__ void advance() { round ^= 1; }
};

}  // namespace
}  // namespace lorakernels
