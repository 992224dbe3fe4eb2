// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the kernel that adds up ds and dB from the workspace of quantize_grad_kernel.
#pragma once

#include "device/overlap.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/shared_memory.h"
#include "device/slices.h"
#include "host/launch.h"
#include "ops/quantize_grad/params.h"
#include "ops/quantize_grad/sm90_quantizer.h"

namespace lorakernels {
namespace {

// A block adds up what 128 threads of quantize_grad_kernel stored at once. It is small, so that it may begin beside a
// block of that kernel.
constexpr int kSumThreads = 128, kSharesAtOnce = 16;

// A thread's shares of four numbers, which a thread of quantize_grad_kernel stored together, and where the sums go.
struct Shares {
  bool is_ds, wanted;
  const float4* from;
  int64_t stride, rows, row;  // row: of two numbers; the other two are 8 rows further
  int count, first, col;      // first: a row's first column in ds or dB

  __device__ Shares(const QuantizeGradParams& params, const Grid& grid) {
    const int eights = grid.padded_rank / 8, block_floats = kAtom * grid.padded_rank;
    const int block = static_cast<int>(blockIdx.x) / eights, eight = static_cast<int>(blockIdx.x) % eights;
    const int panel_blocks = static_cast<int>(grid.panels) * kGroups;
    const auto& projections = params.projections;
    is_ds = block < panel_blocks * projections.count;
    const float* source = params.workspace;
    int in_matrix = block;  // which 64 rows of ds or dB
    count = 0, first = 0;
    if (is_ds) {
      const int which = block / panel_blocks, strip = projections.begin(which) / grid.strip_cols;
      in_matrix -= which * panel_blocks, rows = params.rows, first = projections.window[which];
      stride = grid.panels * Grid::kPanelRows * grid.padded_rank;
      count = (projections.end[which] + grid.strip_cols - 1) / grid.strip_cols - strip;
      source += strip * stride + static_cast<int64_t>(in_matrix) * block_floats;
    } else {
      in_matrix -= panel_blocks * projections.count, rows = params.cols;
      const int blocks_of_strip = grid.strip_cols / kAtom, strip = in_matrix / blocks_of_strip;
      int64_t low = 0;
      const bool adapted = strip < grid.strips && projections.window[projections.of(strip * grid.strip_cols)] >= 0;
      if (grid.panels > 0 && adapted) {
        low = grid.block_of(strip * grid.panels);
        count = static_cast<int>(grid.block_of((strip + 1) * grid.panels - 1) - low) + 1;
      }
      stride = grid.segment_floats();
      source += grid.ds_floats + (low + strip) * stride + in_matrix % blocks_of_strip * block_floats;
    }
    stride /= 4;
    from = reinterpret_cast<const float4*>(source) + eight * kSumThreads + threadIdx.x;
    row = static_cast<int64_t>(in_matrix) * kAtom + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    col = eight * 8 + threadIdx.x % 4 * 2;
    wanted = row < rows && col < params.rank && first >= 0 && (is_ds || params.dB != nullptr);
  }

  // Adds them in order. By cp.async, because ptxas adds the first shares before it loads the last ones, and waits for
  // memory each time. staged: shared memory, [kSharesAtOnce, kSumThreads].
  __device__ float4 sum(float4* staged) const {
    constexpr int kTogether = 4;
    float4 sum{};
    float4* const mine = staged + threadIdx.x;
    for (int done = 0; done < count; done += kSharesAtOnce) {
#pragma unroll
      for (int i = 0; i < kSharesAtOnce; ++i) {
        if (i % kTogether == 0 && done + i >= count) break;
        const bool exists = done + i < count;
        copy_async(shared_address(mine + i * kSumThreads), from + (exists ? done + i : 0) * stride, exists);
      }
      wait_for_all_copies();
#pragma unroll
      for (int i = 0; i < kSharesAtOnce; ++i) {
        if (i % kTogether == 0 && done + i >= count) break;
        add(sum, mine[i * kSumThreads]);
      }
    }
    return sum;
  }

  template <typename To>
  __device__ void store(void* to, int64_t pitch, int rank, const float4& sum) const {
    const auto store_two = [&](int64_t row, float one, float two) {
      if (row >= rows) return;
      To* const target = static_cast<To*>(to) + row * pitch + first + col;
      target[0] = static_cast<To>(one);
      if (col + 1 < rank) target[1] = static_cast<To>(two);
    };
    store_two(row, sum.x, sum.y);
    store_two(row + 8, sum.z, sum.w);
  }
};

// Makes dy8 where quantize_grad_kernel had no scale. All threads of the grid call it.
template <typename T>
__device__ void quantize_late(const QuantizeGradParams& params, int blocks) {
  const float scale = scale_of_partials(params.scale, blocks);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (thread == 0) *params.scale_inv = __frcp_rn(scale);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSumThreads, eights = params.rows * params.cols / 8;
#pragma unroll 4
  for (int64_t i = thread; i < eights; i += step) {
    const uint4 words = static_cast<const uint4*>(params.dy)[i];
    reinterpret_cast<uint2*>(params.dy8)[i] =
        params.is_e5m2 ? fp8_of_eight<T, __NV_E5M2>(words, scale) : fp8_of_eight<T, __NV_E4M3>(words, scale);
  }
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_shares_kernel(const __grid_constant__ QuantizeGradParams params, const __grid_constant__ Grid grid) {
  extern __shared__ float4 staged[];
  let_next_kernel_start();
  const Shares shares(params, grid);
  wait_for_previous_kernel();
  // is asked for here and used at the end, so that nobody waits for it
  const bool one_scale = params.scale_inv != nullptr && !params.in_blocks;
  const float kept = !one_scale ? 1.0f : params.scale.kept == nullptr ? 0.0f : *params.scale.kept;
  if (shares.wanted) {
    float4 sum = shares.sum(staged);
    sum.x *= params.scaling, sum.y *= params.scaling, sum.z *= params.scaling, sum.w *= params.scaling;
    const int rank = static_cast<int>(params.rank);
    if (shares.is_ds) {
      shares.store<T>(params.ds, params.projections.pitch, rank, sum);
    } else if (params.b_dtype == FloatType::kFloat32) {
      shares.store<float>(params.dB, rank, rank, sum);
    } else if (params.b_dtype == FloatType::kBFloat16) {
      shares.store<__nv_bfloat16>(params.dB, rank, rank, sum);
    } else {
      shares.store<__half>(params.dB, rank, rank, sum);
    }
  }
  if (!(kept > 0.0f)) quantize_late<T>(params, static_cast<int>(grid.blocks));
}

template <typename T>
void launch_sum_shares(const QuantizeGradParams& params, const Grid& grid, cudaStream_t stream) {
  const int64_t rows = grid.panels * Grid::kPanelRows * params.projections.count +
                       (params.dB == nullptr ? 0 : grid.strips * grid.strip_cols);
  // of no rows, and without dB, one block may still have to write scale_inv
  const int64_t blocks = std::max<int64_t>(1, rows / kAtom * (grid.padded_rank / 8));
  launch_kernel(sum_shares_kernel<T>, static_cast<unsigned>(blocks), kSumThreads,
                kSharesAtOnce * kSumThreads * sizeof(float4), stream, true, params, grid);
}

}  // namespace
}  // namespace lorakernels
