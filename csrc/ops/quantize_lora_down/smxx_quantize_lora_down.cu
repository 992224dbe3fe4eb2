// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "device/overlap.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/mma_sync.h"
#include "device/ptx/shared_memory.h"
#include "device/slices.h"
#include "host/build_info.h"
#include "host/launch.h"
#include "ops/quantize_lora_down/elements.h"
#include "ops/quantize_lora_down/params.h"
#include "ops/quantize_lora_down/sm90_boxes.h"
#include "ops/quantize_lora_down/sm90_panels.h"

namespace lorakernels {
namespace {

using Plan = QuantizeLoraDownPlan;

constexpr int kWarps = Plan::kWarpsOfBlock;
constexpr int kThreads = 32 * kWarps;
constexpr int kStepColumns = Plan::kStepColumns;
constexpr int kFinishThreads = 256;
constexpr int kStages = 3;  // steps of a warp in shared memory, filled or being copied

// Copies the slice's columns of A, rounded to T, into shared memory.
template <typename T, int kRank>
__device__ void load_A(uint4* target, uint32_t pitch, const QuantizeLoraDownParams& params, uint32_t slice_start,
                       uint32_t slice) {
  for (uint32_t i = threadIdx.x; i < kRank * (slice / 8); i += kThreads) {
    const uint32_t r = i / (slice / 8), in_slice = i % (slice / 8);
    target[r * pitch + in_slice] = WordsOfA(params, r, slice_start + in_slice * 8).rounded<T>(params);
  }
}

// Where a warp is: at rows `row` to `row` + 15 and columns `col` to `col` + 63.
struct Position {
  uint32_t row, col;

  __device__ void advance(uint32_t slice_start, uint32_t slice_end, uint32_t row_step) {
    col += kStepColumns;
    if (col >= slice_end) col = slice_start, row += row_step;
  }
};

// The form for every architecture. Thread (g, t) = (lane / 4, lane % 4) of a warp holds rows g and g + 8, columns
// 8 t … 8 t + 7 of 32. These are the columns of one draw and, in this order, the operands of two MMAs. A thread copies
// its elements into shared memory of its own, a few steps ahead, so that nothing but its own copies makes it wait.
template <typename T, int kRankTiles, bool kDropout>
__global__ void __launch_bounds__(kThreads, kRankTiles > 4 ? 1 : 2)
    quantize_lora_down_kernel(const __grid_constant__ QuantizeLoraDownParams params,
                              const __grid_constant__ Plan plan) {
  extern __shared__ uint4 shared[];
  constexpr int kRank = 8 * kRankTiles;
  begin_after_previous_kernel();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t in_row = lane / 4, in_col = lane % 4 * 8;
  const uint32_t cols = static_cast<uint32_t>(params.cols), rows = static_cast<uint32_t>(params.rows);
  const uint32_t slice = static_cast<uint32_t>(plan.slice), slice_start = blockIdx.x * slice;
  const uint32_t slice_end = min(slice_start + slice, cols), row_step = gridDim.y * kWarps * 16;
  const uint32_t pitch =
      slice / 8 + 4;  // between A's rows in shared memory, in units of 16 bytes; two rows are half the banks apart
  uint4* const lora_A = shared;
  uint4* const ring = lora_A + kRank * pitch + threadIdx.x;

  Position ahead{(blockIdx.y * kWarps + warp) * 16, slice_start};
  const auto copy_step = [&](int stage) {
    if (ahead.row < rows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t row = ahead.row + i / 2 * 8 + in_row, col = ahead.col + i % 2 * 32 + in_col;
        const bool inside = row < rows && col < slice_end;
        const int64_t at = inside ? static_cast<int64_t>(row) * cols + col : 0;
        copy_async(shared_address(ring + (stage * 4 + i) * kThreads), static_cast<const T*>(params.x) + at, inside);
      }
      ahead.advance(slice_start, slice_end, row_step);
    }
    commit_copies();
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) copy_step(stage);
  load_A<T, kRank>(lora_A, pitch, params, slice_start, slice);
  Quantizer<T> quantizer(params);
  const Dropper dropper = kDropout ? Dropper(params.dropout) : Dropper();
  float sum[kRankTiles > 0 ? kRankTiles : 1][4] = {};
  __syncthreads();

  int stage = 0;
  for (Position here{(blockIdx.y * kWarps + warp) * 16, slice_start}; here.row < rows;) {
    wait_for_copies<kStages - 2>();
    uint4 words[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = ring[(stage * 4 + i) * kThreads];
    copy_step((stage + kStages - 1) % kStages);
    stage = (stage + 1) % kStages;

    const uint32_t row = here.row + in_row, col = here.col + in_col;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at_row = row + i / 2 * 8, at_col = col + i % 2 * 32;
      quantizer.see(words[i / 2][i % 2]);
      store_if(quantizer.known && at_row < rows && at_col < slice_end,
               params.x8 + (static_cast<int64_t>(at_row) * cols + at_col),
               quantized<T>(words[i / 2][i % 2], quantizer.scale));
    }
    if constexpr (kDropout) {
      PhiloxDraw draws[4];
      const uint4 of_row[2] = {dropper.of_row(row), dropper.of_row(row + 8)};
      const DrawsOfColumn columns[2] = {dropper.of_column(col), dropper.of_column(col + 32)};
      Dropper::begin(draws, of_row, columns);
      dropper.keys.template draw<3>(draws);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = dropper.survivors(words[i / 2][i % 2], draws[i]);
    }
    if constexpr (kRankTiles > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 &top = words[0][half], &bottom = words[1][half];
        const uint4* const a_columns = lora_A + in_row * pitch + (here.col - slice_start + 32 * half + in_col) / 8;
#pragma unroll
        for (int tile = 0; tile < kRankTiles; ++tile) {
          const uint4 a = a_columns[8 * tile * pitch];
          mma<T>(sum[tile], top.x, bottom.x, top.y, bottom.y, a.x, a.y);
          mma<T>(sum[tile], top.z, bottom.z, top.w, bottom.w, a.z, a.w);
        }
      }
    }

    here.advance(slice_start, slice_end, row_step);
    if (kRankTiles > 0 && here.col == slice_start) {
      float* const target =
          params.workspace + plan.offset_sums + (static_cast<int64_t>(blockIdx.x) * rows + row) * kRank;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tile = 0; tile < kRankTiles; ++tile) {
          if (row + 8 * i < rows) {
            *reinterpret_cast<float2*>(target + 8 * i * kRank + 8 * tile + in_col / 4) = {sum[tile][2 * i],
                                                                                          sum[tile][2 * i + 1]};
          }
          sum[tile][2 * i] = sum[tile][2 * i + 1] = 0.0f;
        }
      }
    }
  }
  __syncthreads();
  quantizer.leave(params, reinterpret_cast<uint32_t*>(shared));
}

// Adds up s from the slices' sums, first to last. Makes x8 if its scale has to come from the blocks' amaxes.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ QuantizeLoraDownParams params, const __grid_constant__ Plan plan) {
  begin_after_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kFinishThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFinishThreads;
  const int64_t count = params.rows * plan.rank_columns;
  const bool shifts = (plan.rank_columns & (plan.rank_columns - 1)) == 0;
  const int bits = __ffsll(plan.rank_columns) - 1;  // log2 of a power of two
  const float factor = dropout_survivor_scale(params.dropout.threshold);
  for (int64_t i = first; i < count; i += step) {
    const int64_t row = shifts ? i >> bits : i / plan.rank_columns, r = i - row * plan.rank_columns;
    if (r >= params.rank) continue;
    const float* const from = params.workspace + plan.offset_sums + i;
    const float sum = sum_of_slices<float>(static_cast<uint32_t>(plan.slices),
                                           [&](uint32_t slice) { return __ldcg(from + slice * count); });
    static_cast<T*>(params.s)[row * params.s_pitch + r] = static_cast<T>(sum * factor);
  }

  if (params.x8 == nullptr || params.in_blocks || (params.kept != nullptr && *params.kept > 0.0f)) return;
  uint32_t amax = 0;
  for (int64_t i = threadIdx.x % 32; i < plan.slices * plan.row_blocks; i += 32) {
    amax = max(amax, __float_as_uint(__ldcg(params.workspace + i)));
  }
  const float scale = scale_of_amax(__uint_as_float(__reduce_max_sync(0xFFFFFFFFu, amax)), kE4M3Max);
  if (first == 0) *params.scale_inv = 1.0f / scale;
#pragma unroll 4
  for (int64_t i = first; i < params.rows * params.cols / 8; i += step) {
    reinterpret_cast<uint2*>(params.x8)[i] = quantized<T>(static_cast<const uint4*>(params.x)[i], scale);
  }
}

template <typename T, int kRankTiles, bool kDropout>
void launch_warps(const QuantizeLoraDownParams& params, const Plan& plan, cudaStream_t stream) {
  const auto kernel = quantize_lora_down_kernel<T, kRankTiles, kDropout>;
  const size_t bytes = sizeof(uint4) * (8 * kRankTiles * (plan.slice / 8 + 4) + kStages * 4 * kThreads);
  const dim3 blocks(static_cast<unsigned>(plan.slices), static_cast<unsigned>(plan.row_blocks));
  launch_kernel(kernel, blocks, kThreads, bytes, stream, true, params, plan);
}

template <typename T, int kRankTiles, bool kDropout>
void launch_form(const QuantizeLoraDownParams& params, const Plan& plan, cudaStream_t stream) {
  if constexpr (8 * kRankTiles <= Plan::kWarpsRank) {
    if (plan.form == Plan::Form::kWarps) return launch_warps<T, kRankTiles, kDropout>(params, plan, stream);
  }
  if constexpr (kRankTiles <= 4) {
    if (plan.form == Plan::Form::kBoxes) return launch_boxes<T, kRankTiles, kDropout>(params, plan, stream);
  }
  if constexpr (kRankTiles >= 4) launch_panels<T, 8 * kRankTiles, kDropout>(params, plan, stream);
}

template <typename T>
void launch_typed(const QuantizeLoraDownParams& params, const Plan& plan, cudaStream_t stream) {
  const bool drops = params.dropout.threshold > 0;
  switch (plan.rank_columns) {
    case 0:
      launch_form<T, 0, false>(params, plan, stream);
      break;
    case 16:
      drops ? launch_form<T, 2, true>(params, plan, stream) : launch_form<T, 2, false>(params, plan, stream);
      break;
    case 32:
      drops ? launch_form<T, 4, true>(params, plan, stream) : launch_form<T, 4, false>(params, plan, stream);
      break;
    case 64:
      drops ? launch_form<T, 8, true>(params, plan, stream) : launch_form<T, 8, false>(params, plan, stream);
      break;
    case 128:
      drops ? launch_form<T, 16, true>(params, plan, stream) : launch_form<T, 16, false>(params, plan, stream);
      break;
    case 192:
      drops ? launch_form<T, 24, true>(params, plan, stream) : launch_form<T, 24, false>(params, plan, stream);
      break;
    default:
      drops ? launch_form<T, 32, true>(params, plan, stream) : launch_form<T, 32, false>(params, plan, stream);
  }
  const int64_t sums = (params.rows * plan.rank_columns + kFinishThreads - 1) / kFinishThreads;
  const int64_t multiprocessors = current_device().multiprocessors;
  const int64_t blocks = std::clamp<int64_t>(sums, 2 * multiprocessors, 16 * multiprocessors);
  launch_kernel(finish_kernel<T>, dim3(static_cast<unsigned>(blocks)), kFinishThreads, 0, stream, true, params, plan);
}

// The part of s, and of A, from rank `first` on, `count` ranks at most. The first pass makes x8 and amax.
QuantizeLoraDownParams ranks_from(const QuantizeLoraDownParams& params, int64_t first, int64_t count) {
  QuantizeLoraDownParams pass = params;
  if (first == 0 && params.rank <= count) return pass;
  pass.rank = std::min(params.rank - first, count);
  const int64_t a_bytes = params.a_dtype == FloatType::kFloat32 ? 4 : 2;
  pass.s = static_cast<uint16_t*>(params.s) + first;
  pass.lora_A = static_cast<const uint8_t*>(params.lora_A) + first * params.cols * a_bytes;
  if (first > 0) pass.x8 = nullptr, pass.scale_inv = nullptr, pass.amax = nullptr;
  return pass;
}

}  // namespace

QuantizeLoraDownPlan quantize_lora_down_plan(int64_t rows, int64_t cols, int64_t rank, int device) {
  static const bool has_wgmma = built_for("90a");
  const DeviceGuard guard(device);
  const Device found = current_device();
  const int capability = 10 * found.capability_major + found.capability_minor;
  return {rows, cols, rank, capability, found.multiprocessors, has_wgmma};
}

void launch_quantize_lora_down(const QuantizeLoraDownParams& params, void* stream, int device) {
  if (params.rows == 0) return;
  const DeviceGuard guard(device);
  const Plan plan = quantize_lora_down_plan(params.rows, params.cols, params.rank, device);
  if (params.in_blocks && !plan.has_whole_blocks()) {
    throw std::invalid_argument("quantize_lora_down: power_of_two must be None where its kernel has no whole blocks");
  }
  const auto on = static_cast<cudaStream_t>(stream);
  for (int64_t first = 0; first == 0 || first < params.rank; first += plan.rank_columns) {
    const QuantizeLoraDownParams pass = ranks_from(params, first, plan.rank_columns);
    params.dtype == FloatType::kBFloat16 ? launch_typed<__nv_bfloat16>(pass, plan, on)
                                         : launch_typed<__half>(pass, plan, on);
    if (params.rank == 0) return;
  }
}

}  // namespace lorakernels
