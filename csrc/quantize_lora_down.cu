// SPDX-License-Identifier: Apache-2.0
#include <cuda_fp8.h>

#include "launch.h"
#include "mma_sync.h"
#include "pairs.h"
#include "quantize_lora_down.h"

namespace lorakernels {
namespace {

using Grid = QuantizeLoraDownGrid;

constexpr int kWarps = Grid::kWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kStepColumns = Grid::kStepColumns;
constexpr int kLoads = 4;   // 16-byte loads of a thread for 16 rows × 64 columns
constexpr int kStages = 3;  // steps whose loads are in flight, this one's included

__device__ uint32_t fp8_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
}

// The bytes of 8 elements.
template <typename T>
__device__ uint2 quantized(const uint4& group, float scale) {
  const float2 a = unpacked<T>(group.x), b = unpacked<T>(group.y), c = unpacked<T>(group.z), d = unpacked<T>(group.w);
  return {fp8_pair(a.x * scale, a.y * scale) | fp8_pair(b.x * scale, b.y * scale) << 16,
          fp8_pair(c.x * scale, c.y * scale) | fp8_pair(d.x * scale, d.y * scale) << 16};
}

// A pair of elements with the two that `lanes`, their word of the draw, drops set to zero.
__device__ uint32_t kept(uint32_t pair, uint32_t lanes, uint32_t threshold_on_top) {
  const uint32_t low = lanes << 16 >= threshold_on_top ? 0x0000FFFFu : 0u;
  const uint32_t high = lanes >= threshold_on_top ? 0xFFFF0000u : 0u;
  return pair & (low | high);
}

template <typename T>
__device__ void raise_amax(float* amax, uint32_t magnitudes) {
  __shared__ uint32_t of_warp[kWarps];
  uint32_t largest = warp_max_magnitude(magnitudes);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) largest = max(largest, of_warp[warp]);
  atomicMax(reinterpret_cast<int*>(amax), __float_as_int(unpacked<T>(largest).x));
}

// The slice's columns of A, rounded to T, zeros where there are none, into shared memory.
template <typename T, int kRank>
__device__ void load_A(uint4* target, uint32_t pitch, const QuantizeLoraDownParams& params, uint32_t slice_start,
                       uint32_t slice_end, uint32_t slice) {
  for (uint32_t i = threadIdx.x; i < kRank * (slice / 8); i += kThreads) {
    const uint32_t r = i / (slice / 8), in_slice = i % (slice / 8), col = slice_start + in_slice * 8;
    uint4 group{0, 0, 0, 0};
    if (r < params.rank && col < slice_end) {
      const int64_t at = r * params.cols + col;
      if (params.a_dtype == FloatType::kFloat32) {
        const float4* const source = reinterpret_cast<const float4*>(static_cast<const float*>(params.lora_A) + at);
        const float4 low = source[0], high = source[1];
        group = {packed<T>(low.x, low.y), packed<T>(low.z, low.w), packed<T>(high.x, high.y),
                 packed<T>(high.z, high.w)};
      } else {
        group = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.lora_A) + at);
      }
    }
    target[r * pitch + in_slice] = group;
  }
}

// Where a warp is: rows `row` … + 15, columns `col` … + 63 of its block's slice.
struct Position {
  uint32_t row, col;

  __device__ void advance(uint32_t slice_start, uint32_t slice_end, uint32_t row_step) {
    col += kStepColumns;
    if (col >= slice_end) col = slice_start, row += row_step;
  }
};

// A thread (g, t) = (lane / 4, lane % 4) of a warp holds rows g and g + 8, columns 8 t … 8 t + 7 of 32: the columns of
// one draw, and as they lie the operands of two MMAs, since a dot product may run over its index in any order as long
// as both sides run in the same. It copies what it needs into shared memory of its own, a few steps ahead.
template <typename T, int kRankTiles, bool kDropout>
__global__ void __launch_bounds__(kThreads, kRankTiles > 4 ? 1 : 2)
    quantize_lora_down_kernel(const QuantizeLoraDownParams params, uint32_t slice) {
  extern __shared__ uint4 shared[];
  constexpr int kRank = 8 * kRankTiles;
  begin_after_previous_kernel();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t in_row = lane / 4, in_col = lane % 4 * 8;
  const uint32_t cols = static_cast<uint32_t>(params.cols), rows = static_cast<uint32_t>(params.rows);
  const uint32_t slice_start = blockIdx.x * slice, slice_end = min(slice_start + slice, cols);
  const uint32_t row_step = gridDim.y * kWarps * 16;
  const uint32_t pitch = slice / 8 + 4;  // of A's rows in shared memory, in 16 bytes: two rows are half the banks apart
  uint4* const lora_A = shared;
  uint4* const ring = lora_A + kRank * pitch + threadIdx.x;

  Position ahead{(blockIdx.y * kWarps + warp) * 16, slice_start};
  const auto copy_step = [&](int stage) {
    if (ahead.row < rows) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint32_t row = ahead.row + i % 2 * 8 + in_row, col = ahead.col + i / 2 * 32 + in_col;
        const bool inside = row < rows && col < slice_end;
        const int64_t at = inside ? static_cast<int64_t>(row) * cols + col : 0;
        copy_async(ring + (stage * kLoads + i) * kThreads, static_cast<const T*>(params.x) + at, inside);
      }
      ahead.advance(slice_start, slice_end, row_step);
    }
    commit_copies();
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy_step(stage);
  load_A<T, kRank>(lora_A, pitch, params, slice_start, slice_end, slice);

  const float scale = params.x8 != nullptr ? scale_to_use(params.scale) : 0.0f;
  if (params.x8 != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *params.scale_inv = 1.0f / scale;
  const uint32_t threshold_on_top = params.dropout.threshold << 16;
  uint64_t key = 0, offset = 0;
  if constexpr (kDropout) {
    key = static_cast<uint64_t>(params.dropout.slot[0]);
    offset = static_cast<uint64_t>(params.dropout.slot[1]);
  }
  uint32_t magnitudes = 0;
  float sum[kRankTiles > 0 ? kRankTiles : 1][4] = {};
  __syncthreads();

  int stage = 0;
  for (Position here{(blockIdx.y * kWarps + warp) * 16, slice_start}; here.row < rows;) {
    wait_for_copies<kStages - 2>();
    uint4 group[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) group[i] = ring[(stage * kLoads + i) * kThreads];
    copy_step((stage + kStages - 1) % kStages);
    stage = (stage + 1) % kStages;

    if (params.x8 != nullptr) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint32_t row = here.row + i % 2 * 8 + in_row, col = here.col + i / 2 * 32 + in_col;
        for (const uint32_t word : {group[i].x, group[i].y, group[i].z, group[i].w}) {
          magnitudes = max_magnitude(magnitudes, word);
        }
        if (row < rows && col < slice_end) {
          __stwb(reinterpret_cast<uint2*>(params.x8 + (static_cast<int64_t>(row) * cols + col)),
                 quantized<T>(group[i], scale));
        }
      }
    }
    if constexpr (kDropout) {
      PhiloxDraw draws[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        draws[i] = {{params.dropout.first_row + here.row + i % 2 * 8 + in_row,
                     (params.dropout.first_col + here.col + i / 2 * 32 + in_col) / kDropoutLanesPerDraw,
                     static_cast<uint32_t>(offset), params.dropout.site}};
      }
      philox4x32_10(draws, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        group[i].x = kept(group[i].x, draws[i].word[0], threshold_on_top);
        group[i].y = kept(group[i].y, draws[i].word[1], threshold_on_top);
        group[i].z = kept(group[i].z, draws[i].word[2], threshold_on_top);
        group[i].w = kept(group[i].w, draws[i].word[3], threshold_on_top);
      }
    }
    if constexpr (kRankTiles > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 &top = group[2 * half], &bottom = group[2 * half + 1];
        const uint4* const a_columns = lora_A + in_row * pitch + (here.col - slice_start + 32 * half + in_col) / 8;
#pragma unroll
        for (int tile = 0; tile < kRankTiles; ++tile) {
          const uint4 a = a_columns[8 * tile * pitch];
          mma<T>(sum[tile], top.x, bottom.x, top.y, bottom.y, a.x, a.y);
          mma<T>(sum[tile], top.z, bottom.z, top.w, bottom.w, a.z, a.w);
        }
      }
    }

    const uint32_t row = here.row + in_row;
    here.advance(slice_start, slice_end, row_step);
    if (kRankTiles > 0 && here.col == slice_start) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* const target = params.partial + (static_cast<int64_t>(blockIdx.x) * rows + row + 8 * i) * kRank;
#pragma unroll
        for (int tile = 0; tile < kRankTiles; ++tile) {
          if (row + 8 * i < rows) {
            *reinterpret_cast<float2*>(target + 8 * tile + in_col / 4) = {sum[tile][2 * i], sum[tile][2 * i + 1]};
          }
          sum[tile][2 * i] = sum[tile][2 * i + 1] = 0.0f;
        }
      }
    }
  }
  if (params.amax != nullptr) raise_amax<T>(params.amax, magnitudes);
}

// s from the slices' partial sums, first to last. On Hopper it is launched while the kernel before still runs.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_slices_kernel(const QuantizeLoraDownParams params, int64_t slices, uint32_t rank_columns) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  const int64_t count = params.rows * rank_columns;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t r = i % rank_columns;
  if (i >= count || r >= params.rank) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t slice = 0; slice < slices; ++slice) sum += params.partial[slice * count + i];
  const float factor = dropout_survivor_scale(params.dropout.threshold);
  static_cast<T*>(params.s)[i / rank_columns * params.rank + r] = static_cast<T>(sum * factor);
}

template <typename T, int kRankTiles, bool kDropout>
void launch(const QuantizeLoraDownParams& params, const Grid& grid, cudaStream_t stream) {
  const auto kernel = quantize_lora_down_kernel<T, kRankTiles, kDropout>;
  const size_t bytes = sizeof(uint4) * (8 * kRankTiles * (grid.slice / 8 + 4) + kStages * kLoads * kThreads);
  LORAKERNELS_CHECK_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const dim3 blocks(static_cast<unsigned>(grid.slices), static_cast<unsigned>(grid.blocks_of_slice));
  launch_kernel(kernel, blocks, kThreads, bytes, stream, true, params, static_cast<uint32_t>(grid.slice));
}

template <typename T>
void launch_rank(const QuantizeLoraDownParams& params, const Grid& grid, cudaStream_t stream) {
  const bool drops = params.dropout.threshold > 0;
  switch (grid.rank_columns) {
    case 0:
      return launch<T, 0, false>(params, grid, stream);
    case 16:
      return drops ? launch<T, 2, true>(params, grid, stream) : launch<T, 2, false>(params, grid, stream);
    case 32:
      return drops ? launch<T, 4, true>(params, grid, stream) : launch<T, 4, false>(params, grid, stream);
    case 64:
      return drops ? launch<T, 8, true>(params, grid, stream) : launch<T, 8, false>(params, grid, stream);
    default:
      return drops ? launch<T, 16, true>(params, grid, stream) : launch<T, 16, false>(params, grid, stream);
  }
}

template <typename T>
void launch_typed(const QuantizeLoraDownParams& params, cudaStream_t stream) {
  const Grid grid(params.rows, params.cols, params.rank);
  launch_rank<T>(params, grid, stream);
  if (params.rank == 0) return;
  const int64_t sums = params.rows * grid.rank_columns;
  const dim3 blocks(static_cast<unsigned>((sums + kThreads - 1) / kThreads));
  launch_kernel(sum_slices_kernel<T>, blocks, kThreads, 0, stream, true, params, grid.slices,
                static_cast<uint32_t>(grid.rank_columns));
}

}  // namespace

void launch_quantize_lora_down(const QuantizeLoraDownParams& params, void* stream, int device) {
  if (params.rows == 0) return;
  const DeviceGuard guard(device);
  if (params.x8 != nullptr) {
    launch_amax_if_unset(params.scale, params.x, params.rows * params.cols, params.dtype, stream, -1);
  }
  const auto on = static_cast<cudaStream_t>(stream);
  params.dtype == FloatType::kBFloat16 ? launch_typed<__nv_bfloat16>(params, on) : launch_typed<__half>(params, on);
}

}  // namespace lorakernels
