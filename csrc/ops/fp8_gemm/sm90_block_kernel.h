// SPDX-License-Identifier: Apache-2.0
// For .cu files only: sm90_kernel.h for operands in blocks, with scales of 1 × 128 and 128 × 128 (params.h). A step
// along depth is a block's 128. Its sum leaves the tensor cores, is multiplied by the scales and added in fp32.
#pragma once

#include "ops/fp8_gemm/sm90_kernel.h"

namespace lorakernels {
namespace {

template <Product kProduct, Shape kShape, int kRankStep>
struct BlockTiling : Tiling<kProduct, kShape, kRankStep> {
  using Base = Tiling<kProduct, kShape, kRankStep>;
  static constexpr bool kScaledBlocks = true;
  static constexpr bool kPairs = kShape == Shape::kSmall;  // registers hold two sums of a step
};

template <Product kProduct, typename T, bool kE5M2, Shape kShape, int kRankStep>
__global__ void __launch_bounds__(BlockTiling<kProduct, kShape, kRankStep>::kThreads, 1)
    fp8_block_gemm_kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
                          const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap residual,
                          const __grid_constant__ Fp8GemmParams params) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = BlockTiling<kProduct, kShape, kRankStep>;
  compute_tiles<T, Tile, Consumer<T, kE5M2, true, Tile, kRankStep>, kRankStep, Tile::kPairs ? kPartSteps : 1>(
      left, right, out, residual, params);
#endif
}

template <Product kProduct, typename T, bool kE5M2, Shape kShape, int kRankStep>
void launch_blocks(const Fp8GemmParams& params, cudaStream_t stream) {
  launch_over_tiles<T, BlockTiling<kProduct, kShape, kRankStep>>(
      fp8_block_gemm_kernel<kProduct, T, kE5M2, kShape, kRankStep>, params, stream);
}

}  // namespace
}  // namespace lorakernels
