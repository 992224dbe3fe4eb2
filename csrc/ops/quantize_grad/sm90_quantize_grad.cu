// SPDX-License-Identifier: Apache-2.0
#include "device/draw_mask.h"
#include "device/overlap.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/quantize_grad/sm90_quantizer.h"
#include "ops/quantize_grad/sm90_sum_shares.h"

namespace lorakernels {
namespace {

// Stores the [128, kRank] sums of both warpgroups in the order in which their threads hold them.
template <int kSums>
__device__ void store_sums(float* target, const float (&sum)[kSums]) {
  const auto mine = reinterpret_cast<float4*>(target) + threadIdx.x / 128 * (kSums / 4 * 128) + threadIdx.x % 128;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    __stcg(mine + j * 128, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
  }
}

// The scale of dy8. It is 0 if it has to come from the amaxes of all blocks, of which sum_shares_kernel makes it.
template <int kRank>
__device__ __forceinline__ float scale_of_tiles(const QuantizeGradParams& params) {
  if (params.in_blocks) return 1.0f;
  return kRank == 0 ? scale_to_use(params.scale) : kept_scale(params.scale);
}

// Writes what dy's elements give together. The threads from kFirst on, kThreads of them, have quantized.
template <typename T, int kFirst, int kThreads>
__device__ __forceinline__ void leave_amax_and_scale(const QuantizeGradParams& params, float scale, uint32_t most,
                                                     uint32_t* most_of_block) {
  const bool leads = threadIdx.x == kFirst;
  most = warp_max_magnitude(most);
  if (params.amax != nullptr) raise_amax<T>(params.amax, most);
  if (params.in_blocks) return;
  if (scale > 0.0f) {
    if (blockIdx.x == 0 && leads) *params.scale_inv = __frcp_rn(scale);
    return;
  }
  if (threadIdx.x % 32 == 0) atomicMax(most_of_block, most);
  sync_some_threads<kThreads>(2);
  if (leads) params.scale.partials[blockIdx.x] = __float_as_uint(unpacked<T>(*most_of_block).x);
}

// The warpgroups that make dy8 and do not multiply. Their first thread brings the first tiles, at rank 0 all tiles.
template <typename T, int kRank, typename Tile, typename Role>
__device__ __forceinline__ void quantize_tiles(const CUtensorMap& dy, const QuantizeGradParams& params,
                                               const Cursor& begin, uint8_t* shared, RingOf<Tile> ring) {
  Producer<Tile> producer(begin, ring);
  for (int stage = 0; stage < kFilledStages<Tile>; ++stage) producer.bring(dy, Role::kFirstQuantizer);
  if (kRank > 0 && params.scale_inv == nullptr) return;
  constexpr int kAtOnce = Role::kLeft < 64 ? 2 : 4;  // as registers allow
  Quantizer<T, Tile, Role::kQuantizingWarps, kAtOnce> quantize(scale_of_tiles<kRank>(params),
                                                               threadIdx.x - Role::kFirstQuantizer);
  quantize.in_form(params, [&](auto format, auto wide, auto blocks) {
    for (Cursor now = begin; now.left > 0; now.advance()) {
#pragma unroll 1
      for (int i = 0; i < Tile::kSteps; ++i, ring.advance()) {
        const int row = now.panel * kPanelRows + i % Tile::kStagesOfStep * Tile::kRows;
        const int col = now.strip * Tile::kStripCols + i / Tile::kStagesOfStep * Tile::kStepCols;
        wait_for(ring.full(), ring.round);
        if constexpr (kRank == 0) producer.bring(dy, Role::kFirstQuantizer);
        const uint8_t* const tile = shared + ring.stage * kStageBytes;
        quantize.template tile<format.value, wide.value, blocks.value>(params, tile, row, col);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(ring.empty());
      }
    }
  });
  leave_amax_and_scale<T, Role::kFirstQuantizer, 128 * Role::kQuantizers>(
      params, quantize.scale, quantize.most, reinterpret_cast<uint32_t*>(shared + Tile::kOffsetMost));
}

// The products of a step in its stages, `first` and `second`, which is `first` where a step has one. `from_zero`: dB of
// the strip begins here.
template <typename T, int kRank, typename Tile, int kSums>
__device__ __forceinline__ void multiply_step(float (&sum_ds)[kSums], float (&sum_dB)[Tile::kSteps][kSums], int step,
                                              const RingOf<Tile>& first, const RingOf<Tile>& second, uint64_t B,
                                              uint64_t s, bool from_zero) {
  using Rows = Factor<kRank>;
  constexpr int kAcross = Tile::kAcross, kStepsOfStage = Tile::kRows / 16;
  constexpr bool kTwo = Tile::kStagesOfStep == 2;
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128,
                                0);  // equal in the warp, so that the compiler keeps it in a uniform register
  const uint32_t below = kTwo ? second.tile() : first.tile() + kAtomBytes;
  const uint64_t rows_of_dy = DyRows::descriptor(group == 0 ? first.tile() : below);
  const uint64_t cols_of_dy[2] = {DyRows::descriptor(first.tile() + group * Tile::kColBytes),
                                  DyRows::descriptor(second.tile() + group * Tile::kColBytes)};
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4 * kAcross; ++k) {  // ds += dy B
    wgmma<T, 0>(sum_ds, moved(rows_of_dy, k / 4 * Tile::kColBytes + k % 4 * 32),
                moved(B, (step * 4 * kAcross + k) * Rows::kBytesOf16Rows), step > 0 || k > 0);
  }
#pragma unroll
  for (int i = 0; i < kAcross / 2; ++i) {
#pragma unroll
    for (int k = 0; k < kPanelRows / 16; ++k) {  // dB += dyᵀ s
      const uint32_t at = i * 2 * Tile::kColBytes + k % kStepsOfStage * (16 * 128);
      wgmma<T, 1>(sum_dB[step * (kAcross / 2) + i], moved(cols_of_dy[k / kStepsOfStage], at),
                  moved(s, k * Rows::kBytesOf16Rows), !from_zero | (k > 0));
    }
  }
  wgmma_commit();
}

// The warpgroups that multiply. Their first thread brings the tiles that are not brought yet. Nobody else makes dy8
// unless the roles say so.
template <typename T, int kRank, typename Tile, typename Role>
__device__ __forceinline__ void multiply_tiles(const CUtensorMap& dy, const QuantizeGradParams& params,
                                               const Grid& grid, const Cursor& begin, uint8_t* shared,
                                               RingOf<Tile> ring) {
  using Rows = Factor<kRank>;
  constexpr int kSums = kRank / 2;  // of a thread
  constexpr int64_t kTileFloats = int64_t{kTileCols} * kRank;
  const uint32_t base = shared_address(shared);
  Cursor now = begin, ahead = begin;
  Producer<Tile> producer(now, ring);
  for (int stage = 0; stage < kFilledStages<Tile>; ++stage) Role::kApart ? producer.skip() : producer.bring(dy, 0);
  if (ahead.left > 0) load_panel_of_s<T, kRank, Tile>(params, base, ahead);
  const bool quantizes = !Role::kApart && params.scale_inv != nullptr;
  Quantizer<T, Tile, Role::kQuantizingWarps, 2> quantize(quantizes ? scale_of_tiles<kRank>(params) : 1.0f, threadIdx.x);

  const uint64_t B = Rows::descriptor(base + Tile::kOffsetB, Tile::kStripCols);
  float sum_dB[Tile::kSteps][kSums] = {};
  for (; now.left > 0; now.advance()) {
    const bool begins = now.count == 0 || now.panel == 0, ends = now.panel == now.panels - 1 || now.left == 1;
    const uint64_t s = Rows::descriptor(base + Tile::kOffsetS + now.count % 2 * Tile::kFactorBytes, kPanelRows);
    if (begins) {
      if (now.count > 0) sync_some_threads<kMultiplying>(1);
      load_strip_of_B<T, kRank, Tile>(params, base, now.strip);
    }
    wait_for_all_copies();
    fence_for_async();
    sync_some_threads<kMultiplying>(1);
    ahead.advance();
    if (ahead.left > 0) load_panel_of_s<T, kRank, Tile>(params, base, ahead);
    float sum_ds[kSums] = {};
#pragma unroll
    for (int step = 0; step < Tile::kStepsOfStrip; ++step) {
      RingOf<Tile> last = ring;
      wait_for(ring.full(), ring.round);
      if constexpr (Tile::kStagesOfStep == 2) {
        last.advance();
        wait_for(last.full(), last.round);
      }
      multiply_step<T, kRank, Tile>(sum_ds, sum_dB, step, ring, last, B, s, begins);
#pragma unroll
      for (int i = 0; i < Tile::kStagesOfStep; ++i) producer.bring(dy, 0);
      if (quantizes) {
        const int row = now.panel * kPanelRows, col = now.strip * Tile::kStripCols + step * Tile::kStepCols;
        quantize.in_form(params, [&](auto format, auto wide, auto blocks) {
          const uint8_t* const tile = shared + ring.stage * kStageBytes;
          quantize.template tile<format.value, wide.value, blocks.value>(params, tile, row, col);
        });
      }
      wgmma_wait();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < Tile::kStagesOfStep; ++i, ring.advance()) {
        if (threadIdx.x % 32 == 0) arrive(ring.empty());
      }
    }
    const int64_t panel = now.strip * grid.panels + now.panel;
    store_sums(params.workspace + panel * kTileFloats, sum_ds);
    if (!ends || params.dB == nullptr) continue;
    float* const segment = params.workspace + grid.ds_floats + (blockIdx.x + now.strip) * (Tile::kSteps * kTileFloats);
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      store_sums(segment + step * kTileFloats, sum_dB[step]);
    }
  }
  if (!quantizes) return;
  leave_amax_and_scale<T, 0, kMultiplying>(params, quantize.scale, quantize.most,
                                           reinterpret_cast<uint32_t*>(shared + Tile::kOffsetMost));
}

template <typename T, int kRank, int kSteps, bool kDraws, bool kApart>
__global__ void __launch_bounds__((Roles<kRank, kSteps, kDraws, kApart>::kThreads), 1)
    quantize_grad_kernel(const __grid_constant__ CUtensorMap dy, const __grid_constant__ QuantizeGradParams params,
                         const __grid_constant__ Grid grid) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = Tiling<kRank, kSteps>;
  using Role = Roles<kRank, kSteps, kDraws, kApart>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  [[maybe_unused]] const auto drawn = reinterpret_cast<uint32_t*>(shared + Tile::kOffsetDrawn);
  const RingOf<Tile> ring(base, base + Tile::kOffsetBarriers);
  if (threadIdx.x == 0) {
    const int quantizers = params.scale_inv == nullptr ? 0 : 4 * Role::kQuantizers;
    for (RingOf<Tile> each = ring; each.round == 0; each.advance()) {
      init_barrier(each.full(), 1);
      init_barrier(each.empty(), 4 * Role::kMultipliers + quantizers);
    }
    fence_barrier_init();
    *reinterpret_cast<uint32_t*>(shared + Tile::kOffsetMost) = 0;
    if constexpr (kDraws) *drawn = 0;
    if (grid.panels > 0) prefetch_map(dy);  // of no rows there is none
  }
  let_next_kernel_start();
  const Cursor begin(grid);
  if (kRank > 0 && threadIdx.x == 32) prefetch_factors<Tile>(params, begin);
  __syncthreads();
  wait_for_previous_kernel();
  const auto draw = [&] {
    draw_mask<Role::kHelp>(params.dropout, params.dropped, params.rows, params.dropped_cols, drawn);
  };
  const int thread = threadIdx.x;
  if (kDraws && thread >= Role::kFirstDrawer) {
    if constexpr (Role::kShifts) give_registers<Role::kLeft>();
    if constexpr (kDraws && !Role::kHelp) draw();
  } else if (Role::kApart && thread >= Role::kFirstQuantizer) {
    if constexpr (Role::kShifts) give_registers<Role::kLeft>();
    if constexpr (Role::kApart) quantize_tiles<T, kRank, Tile, Role>(dy, params, begin, shared, ring);
  } else if constexpr (kRank > 0) {
    if constexpr (Role::kShifts) take_registers<Role::kWanted>();
    multiply_tiles<T, kRank, Tile, Role>(dy, params, grid, begin, shared, ring);
    if constexpr (Role::kShifts && Role::kHelp) give_registers<Role::kLeft>();
  }
  if constexpr (Role::kHelp) draw();  // one copy of its code for all
#endif
}

// At rank 128 too few registers are left for warps of their own that make dy8.
template <typename T, int kRank, int kSteps, bool kDraws, bool kApart = (kRank < 128)>
void launch_strips(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  using Tile = Tiling<kRank, kSteps>;
  const auto kernel = quantize_grad_kernel<T, kRank, kSteps, kDraws, kApart>;
  constexpr int kBytes = Tile::kBytes, kThreadsOfBlock = Roles<kRank, kSteps, kDraws, kApart>::kThreads;
  const CUtensorMap dy = tensor_map<T>(params.dy, params.rows, params.cols, Tile::kRows);  // swizzled as DyRows
  launch_kernel(kernel, static_cast<unsigned>(grid.blocks), kThreadsOfBlock, kBytes, stream, true, dy, params, grid);
}

template <typename T, int kRank, bool kDraws>
void launch_drawing(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  constexpr int kSteps = Grid::most_steps(kRank);
  if (grid.steps == 1) return launch_strips<T, kRank, 1, kDraws>(params, grid, stream);
  if constexpr (kRank == QuantizeGradLimits::kDrawnRank && kDraws) {
    // The one warpgroup that is left would make dy8 too slowly for blocks of many pairs (docs/facts.md, H30).
    if (grid.strips * grid.panels >= 4 * grid.blocks) {
      return launch_strips<T, kRank, kSteps, kDraws, false>(params, grid, stream);
    }
  }
  launch_strips<T, kRank, kSteps, kDraws>(params, grid, stream);
}

template <typename T, int kRank>
void launch_fused(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  if constexpr (kRank > 0 && kRank <= QuantizeGradLimits::kDrawnRank) {
    if (params.dropped != nullptr) return launch_drawing<T, kRank, true>(params, grid, stream);
  }
  launch_drawing<T, kRank, false>(params, grid, stream);
}

template <typename T>
void launch_of_type(const QuantizeGradParams& params, cudaStream_t stream) {
  const Grid grid(params.rows, params.cols, params.rank, params.projections, current_device().multiprocessors);
  if (params.rank == 0) return launch_fused<T, 0>(params, grid, stream);
  switch (grid.padded_rank) {
    case 16:
      launch_fused<T, 16>(params, grid, stream);
      break;
    case 32:
      launch_fused<T, 32>(params, grid, stream);
      break;
    case 64:
      launch_fused<T, 64>(params, grid, stream);
      break;
    default:
      launch_fused<T, 128>(params, grid, stream);
  }
  launch_sum_shares<T>(params, grid, stream);
}

}  // namespace

void launch_quantize_grad(const QuantizeGradParams& params, void* stream, int device) {
  if (params.cols == 0 || (params.scale_inv == nullptr && params.rank == 0)) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  if (params.rank == 0 && params.scale_inv != nullptr && !params.in_blocks) {
    launch_amax_if_unset(params.scale, params.dy, params.rows * params.cols, params.dtype, stream, -1);
  }
  if (params.dtype == FloatType::kBFloat16) {
    launch_of_type<__nv_bfloat16>(params, on);
  } else {
    launch_of_type<__half>(params, on);
  }
}

}  // namespace lorakernels
