// SPDX-License-Identifier: Apache-2.0
#include "device/draw_mask.h"
#include "device/overlap.h"
#include "device/ptx/threads.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/quantize_grad/sm90_tiles.h"

namespace lorakernels {
namespace {

constexpr int kSumThreads = 256;

// Stores a warpgroup's [64, kRank] sums in the order in which its threads hold them.
template <int kSums>
__device__ void store_sums(float* target, const float (&sum)[kSums]) {
  const auto mine = reinterpret_cast<float4*>(target) + threadIdx.x % 128;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    __stcg(mine + j * 128, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
  }
}

// Waits for all threads but those that only draw the mask.
template <bool kDraws>
__device__ __forceinline__ void sync_threads() {
  if constexpr (kDraws) {
    sync_some_threads<kThreads>(1);
  } else {
    __syncthreads();
  }
}

template <typename T, int kRank, int kSteps, bool kDraws>
__global__ void __launch_bounds__(kThreadsOf<kDraws>, 1)
    quantize_grad_kernel(const __grid_constant__ CUtensorMap dy, const __grid_constant__ QuantizeGradParams params,
                         const __grid_constant__ Grid grid) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = Tiling<kRank, kSteps>;
  using Rows = Factor<kRank == 0 ? 16 : kRank>;
  constexpr int kSums = kRank == 0 ? 4 : kRank / 2;  // of a thread
  constexpr int64_t kBlockFloats = kAtom * kRank;
  extern __shared__ __align__(1024) uint8_t shared[];
  begin_after_previous_kernel();
  const uint32_t base = shared_address(shared);
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128,
                                0);  // equal in the warp, so that the compiler keeps it in a uniform register
  [[maybe_unused]] const auto drawn = reinterpret_cast<uint32_t*>(shared + Tile::kOffsetDrawn);
  TileRing<Tile::kStages, kStageBytes> ring(base, base + Tile::kOffsetBarriers);
  if (threadIdx.x == 0) {
    for (TileRing<Tile::kStages, kStageBytes> each = ring; each.round == 0; each.advance()) {
      init_barrier(each.full(), 1);
      init_barrier(each.empty(), kThreads / 32);
    }
    fence_barrier_init();
    if constexpr (kDraws) *drawn = 0;
  }
  __syncthreads();
  if constexpr (kDraws) {
    if (threadIdx.x >= kThreads) {
      give_registers<kRegistersOfDrawer>();
      return draw_mask(params.dropout, params.dropped, params.rows, params.dropped_cols, drawn);
    }
    take_registers<kRegistersOfWorker>();
  }
  Cursor now(grid), ahead = now;
  Producer<Tile> producer(now, ring);
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) producer.bring(dy);
  if constexpr (kRank > 0) {
    if (ahead.left > 0) load_panel_of_s<T, kRank, Tile>(params, base, ahead);
  }
  const bool quantizes = params.scale_inv != nullptr;
  Quantizer<T, kRank <= 32 ? 4 : 1> quantize(quantizes ? scale_to_use(params.scale) : 1.0f);
  if (quantizes && blockIdx.x == 0 && threadIdx.x == 0) *params.scale_inv = __frcp_rn(quantize.scale);

  [[maybe_unused]] const uint64_t B = Rows::descriptor(base + Tile::kOffsetB, Tile::kStripCols);
  float sum_dB[Tile::kSteps][kSums] = {};
  for (; now.left > 0; now.advance()) {
    const bool begins = now.count == 0 || now.panel == 0, ends = now.panel == now.panels - 1 || now.left == 1;
    [[maybe_unused]] const uint64_t s =
        Rows::descriptor(base + Tile::kOffsetS + now.count % 2 * Tile::kFactorBytes, kPanelRows);
    if constexpr (kRank > 0) {
      if (begins) {
        sync_threads<kDraws>();
        load_strip_of_B<T, kRank, Tile>(params, base, now.strip);
      }
      wait_for_all_copies();
      fence_for_async();
      sync_threads<kDraws>();
      ahead.advance();
      if (ahead.left > 0) load_panel_of_s<T, kRank, Tile>(params, base, ahead);
    }
    const int64_t first_row = static_cast<int64_t>(now.panel) * kPanelRows;
    const int64_t first_col = static_cast<int64_t>(now.strip) * Tile::kStripCols;
    float sum_ds[kSums] = {};
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step, ring.advance()) {
      wait_for(ring.full(), ring.round);
      if constexpr (kRank > 0) {
        const uint64_t rows_of_dy = DyRows::descriptor(ring.tile() + group * kAtomBytes);
        const uint64_t cols_of_dy = DyRows::descriptor(ring.tile() + group * (2 * kAtomBytes));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k) {  // ds += dy B
          wgmma<T, 0>(sum_ds, moved(rows_of_dy, k / 4 * (2 * kAtomBytes) + k % 4 * 32),
                      moved(B, (step * 8 + k) * Rows::kBytesOf16Rows), step > 0 || k > 0);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {  // dB += dyᵀ s
          wgmma<T, 1>(sum_dB[step], moved(cols_of_dy, k * (16 * 128)), moved(s, k * Rows::kBytesOf16Rows),
                      !begins | (k > 0));
        }
        wgmma_commit();
      }
      producer.bring(dy);
      if (quantizes) {
        const uint8_t* const tile = shared + ring.stage * kStageBytes;
        if (params.is_e5m2) {
          quantize.template tile<__NV_E5M2>(params, tile, first_row, first_col + step * kTileCols);
        } else {
          quantize.template tile<__NV_E4M3>(params, tile, first_row, first_col + step * kTileCols);
        }
      }
      if constexpr (kRank > 0) wgmma_wait();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(ring.empty());
    }
    if constexpr (kRank > 0) {
      const int64_t panel = now.strip * grid.panels + now.panel;
      store_sums(params.workspace + (panel * kGroups + group) * kBlockFloats, sum_ds);
      if (!ends || params.dB == nullptr) continue;
      float* const segment = params.workspace + grid.ds_floats() + (blockIdx.x + now.strip) * grid.segment_floats();
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
        store_sums(segment + (step * kGroups + group) * kBlockFloats, sum_dB[step]);
      }
    }
  }
  if (params.amax != nullptr) raise_amax<T>(params.amax, quantize.most);
  if constexpr (kDraws && kRank < 64) {  // with rank 64 registers would be spilled
    draw_mask(params.dropout, params.dropped, params.rows, params.dropped_cols, drawn);
  }
#endif
}

template <typename T>
__device__ void store_two(void* target, int64_t at, float first, float second, bool has_second) {
  T* const to = static_cast<T*>(target) + at;
  to[0] = static_cast<T>(first);
  if (has_second) to[1] = static_cast<T>(second);
}

// ds and dB from the workspace. A thread adds up four numbers that a thread of quantize_grad_kernel stored together.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_shares_kernel(const __grid_constant__ QuantizeGradParams params, const __grid_constant__ Grid grid) {
  const int per_block = grid.padded_rank / 8 * 128;  // threads for 64 rows
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  const int64_t panel_blocks = grid.panels * kGroups;
  int64_t block = index / per_block;
  const int within = static_cast<int>(index % per_block), thread = within % 128;
  const auto& projections = params.projections;
  const bool is_ds = block < panel_blocks * projections.count;
  const float* source = params.workspace;
  int64_t shares = 0, stride, rows, first = 0;  // first: a row's first column in ds or dB
  if (is_ds) {
    const int which = static_cast<int>(block) / static_cast<int>(panel_blocks);
    block -= which * panel_blocks, rows = params.rows, first = projections.window[which];
    stride = panel_blocks * kAtom * grid.padded_rank;
    const int strip = static_cast<int>(projections.begin(which)) / grid.strip_cols;
    shares = (projections.end[which] + grid.strip_cols - 1) / grid.strip_cols - strip;
    source += strip * stride + (block * per_block + within) * 4;
  } else {
    block -= panel_blocks * projections.count, rows = params.cols;
    const int64_t blocks_of_strip = grid.strip_cols / kAtom, strip = block / blocks_of_strip;
    int64_t low = 0;
    const bool adapted = strip < grid.strips && projections.window[projections.of(strip * grid.strip_cols)] >= 0;
    if (grid.panels > 0 && adapted) {
      low = grid.block_of(strip * grid.panels);
      shares = grid.block_of((strip + 1) * grid.panels - 1) - low + 1;
    }
    stride = grid.segment_floats();
    source += grid.ds_floats() + (low + strip) * stride + ((block % blocks_of_strip) * per_block + within) * 4;
  }
  const int64_t row = block * kAtom + thread / 32 * 16 + thread % 32 / 4;
  const int col = within / 128 * 8 + thread % 4 * 2, rank = static_cast<int>(params.rank);
  begin_after_previous_kernel();
  if (row >= rows || col >= rank || first < 0 || (!is_ds && params.dB == nullptr)) return;
  const int64_t pitch = is_ds ? projections.pitch : rank;
  float sum[4] = {};
#pragma unroll 16
  for (int share = 0; share < static_cast<int>(shares); ++share) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(source + share * stride));
    sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) return;
    const float one = sum[2 * half] * params.scaling, two = sum[2 * half + 1] * params.scaling;
    const int64_t at = (row + 8 * half) * pitch + first + col;
    const bool both = col + 1 < rank;
    if (is_ds) {
      store_two<T>(params.ds, at, one, two, both);
    } else if (params.b_dtype == FloatType::kFloat32) {
      store_two<float>(params.dB, at, one, two, both);
    } else if (params.b_dtype == FloatType::kBFloat16) {
      store_two<__nv_bfloat16>(params.dB, at, one, two, both);
    } else {
      store_two<__half>(params.dB, at, one, two, both);
    }
  }
}

template <typename T, int kRank, int kSteps, bool kDraws>
void launch_strips(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  const auto kernel = quantize_grad_kernel<T, kRank, kSteps, kDraws>;
  constexpr int kBytes = Tiling<kRank, kSteps>::kBytes;
  const CUtensorMap dy = tensor_map<T>(params.dy, params.rows, params.cols, kPanelRows);  // swizzled as DyRows
  launch_kernel(kernel, static_cast<unsigned>(grid.blocks), kThreadsOf<kDraws>, kBytes, stream, true, dy, params, grid);
}

template <typename T, int kRank, bool kDraws>
void launch_drawing(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  grid.steps == 1 ? launch_strips<T, kRank, 1, kDraws>(params, grid, stream)
                  : launch_strips<T, kRank, Grid::most_steps(kRank), kDraws>(params, grid, stream);
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
  const int64_t sums_of = grid.panels * Grid::kPanelRows * params.projections.count +
                          (params.dB == nullptr ? 0 : grid.strips * grid.strip_cols);
  if (sums_of == 0) return;  // of no rows, and without dB: a grid of no blocks cannot be launched
  const int64_t threads = sums_of * grid.padded_rank / 4;
  const auto blocks = static_cast<unsigned>((threads + kSumThreads - 1) / kSumThreads);
  launch_kernel(sum_shares_kernel<T>, blocks, kSumThreads, 0, stream, true, params, grid);
}

}  // namespace

void launch_quantize_grad(const QuantizeGradParams& params, void* stream, int device) {
  if (params.cols == 0 || (params.scale_inv == nullptr && params.rank == 0)) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  if (params.scale_inv != nullptr) {
    launch_amax_if_unset(params.scale, params.dy, params.rows * params.cols, params.dtype, stream, -1);
  }
  if (params.dtype == FloatType::kBFloat16) {
    launch_of_type<__nv_bfloat16>(params, on);
  } else {
    launch_of_type<__half>(params, on);
  }
}

}  // namespace lorakernels
