// SPDX-License-Identifier: Apache-2.0
#include <cuda_fp8.h>

#include "draw_mask.h"
#include "factor.h"
#include "launch.h"
#include "pairs.h"
#include "quantize_grad.h"
#include "tma.h"
#include "wgmma.h"

namespace lorakernels {
namespace {

using Grid = QuantizeGradGrid;

constexpr int kGroups = 2;  // warpgroups of a block
constexpr int kThreads = 128 * kGroups;
template <bool kDraws>
constexpr int kThreadsOf = kThreads + (kDraws ? 128 : 0);  // one warpgroup more, where the mask is asked for
constexpr int kSumThreads = 256;
constexpr int kAtom = 64;  // rows, and columns, of a matrix of 128-byte rows
constexpr int kAtomBytes = kAtom * 128;
constexpr int kStageBytes = 4 * kAtomBytes;  // a tile of 128 × 128 as [column half][row half] atoms
constexpr int kPanelRows = Grid::kPanelRows;
constexpr int kTileCols = Grid::kTileCols;
static_assert(kPanelRows == kGroups * kAtom && kTileCols == kGroups * kAtom);

using DyRows = SwizzledRows<128>;

// B and s in shared memory: rows of the padded rank, cut at 128 bytes into slabs of all rows.
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
  static constexpr int kOffsetBarriers = kOffsetS + 2 * kFactorBytes;     // full, then empty ones
  static constexpr int kOffsetDrawn = kOffsetBarriers + 2 * kStages * 8;  // units of the mask
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

// amax as an integer: of non-negative floats the order is the same, and NaN is above inf.
template <typename T>
__device__ void raise_amax(float* amax, uint32_t most) {
  most = warp_max_magnitude(most);
  if (threadIdx.x % 32 != 0 || most == 0) return;
  atomicMax(reinterpret_cast<int*>(amax), __float_as_int(unpacked<T>(most).x));
}

// The panels of a block's run, in the order in which they are used.
struct Cursor {
  int strip, panel;
  int panels, left;
  int count = 0;  // of panels before this one

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

// Thread 0 brings the tiles of dy, a ring's length less one ahead of their use.
template <typename Tile>
struct Producer {
  Cursor at;
  TileRing<Tile::kStages, kStageBytes> ring;
  int step = 0;

  __device__ Producer(const Cursor& first, const TileRing<Tile::kStages, kStageBytes>& ring) : at(first), ring(ring) {}

  // Once the stage's last tile has been used by all.
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

// dy8 of this warpgroup's half of a tile, 16 neighbouring elements a thread at a time; raises `most`.
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

// A warpgroup's [64, kRank] sums as they lie in registers.
template <int kSums>
__device__ void store_sums(float* target, const float (&sum)[kSums]) {
  const auto mine = reinterpret_cast<float4*>(target) + threadIdx.x % 128;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    __stcg(mine + j * 128, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
  }
}

// Of all but the drawers.
template <bool kDraws>
__device__ __forceinline__ void sync_threads() {
  if constexpr (kDraws) {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
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
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // in a uniform register
  [[maybe_unused]] const auto drawn = reinterpret_cast<uint32_t*>(shared + Tile::kOffsetDrawn);
  TileRing<Tile::kStages, kStageBytes> ring(base, base + Tile::kOffsetBarriers);
  if (threadIdx.x == 0) {
    for (TileRing<Tile::kStages, kStageBytes> each = ring; each.round == 0; each.advance()) {
      init_barrier(each.full(), 1);
      init_barrier(each.empty(), kThreads / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if constexpr (kDraws) *drawn = 0;
  }
  __syncthreads();
  if constexpr (kDraws) {
    if (threadIdx.x >= kThreads) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
      return draw_mask(params.dropout, params.dropped, params.rows, params.dropped_cols, drawn);
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
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
      wait_for_copies();
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
  if constexpr (kDraws && kRank < 64) {  // with 64 that spills registers
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

// ds and dB from the workspace: a thread sums the four numbers that a thread of the kernel before stored together.
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
  int64_t shares = 0, stride, rows, first = 0;  // `first` number of a row
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
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
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

// dy in boxes of 128 rows × 64 columns, swizzled as DyRows.
CUtensorMap map_of(const QuantizeGradParams& params) {
  const auto type =
      params.dtype == FloatType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map(params.dy, type, 2, params.rows, params.cols, kPanelRows);
}

template <typename T, int kRank, int kSteps, bool kDraws>
void launch_strips(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  const auto kernel = quantize_grad_kernel<T, kRank, kSteps, kDraws>;
  constexpr int kBytes = Tiling<kRank, kSteps>::kBytes;
  LORAKERNELS_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_kernel(kernel, static_cast<unsigned>(grid.blocks), kThreadsOf<kDraws>, kBytes, stream, true, map_of(params),
                params, grid);
}

template <typename T, int kRank, bool kDraws>
void launch_drawing(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  grid.steps == 1 ? launch_strips<T, kRank, 1, kDraws>(params, grid, stream)
                  : launch_strips<T, kRank, Grid::most_steps(kRank), kDraws>(params, grid, stream);
}

template <typename T, int kRank>
void launch_fused(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  if constexpr (kRank > 0 && kRank <= Grid::kDrawsToRank) {
    if (params.dropped != nullptr) return launch_drawing<T, kRank, true>(params, grid, stream);
  }
  launch_drawing<T, kRank, false>(params, grid, stream);
}

template <typename T>
void launch_of_type(const QuantizeGradParams& params, cudaStream_t stream) {
  const Grid grid(params.rows, params.cols, params.rank, params.projections);
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
