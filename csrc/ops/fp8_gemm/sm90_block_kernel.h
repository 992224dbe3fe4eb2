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
  static constexpr bool kPairs = Base::kLinear && kShape == Shape::kSmall;  // registers hold two sums of a step
  // Of kGradInputUntransposed alone. A warp fills the ring, and leaves the factors of the rows of kScaledSteps steps,
  // twice. A barrier of each says that they were read.
  static constexpr bool kMany = Base::kUntransposed && Base::kRows > 128;  // sums of a thread
  static constexpr int kProducerRegisters = kMany ? 40 : Base::kProducerRegisters;
  static constexpr int kConsumerRegisters = kMany ? 232 : Base::kConsumerRegisters;
  static_assert(kProducerRegisters + Base::kConsumers * kConsumerRegisters <=
                registers_of_warpgroups<1 + Base::kConsumers>());
  static constexpr int kFillers = Base::kUntransposed ? 32 : 1;
  static constexpr int kScaledSteps = Base::kRows > 128 ? 2 : 4;
  static constexpr int kAhead = 4;  // steps that scales are fetched ahead
  static constexpr int kFactorsBytes = Base::kRows * 4, kAheadBytes = kFactorsBytes + 32 * 4;
  static constexpr int kOffsetFactors = (Base::kBytes + 15) / 16 * 16;
  static constexpr int kOffsetAhead = kOffsetFactors + 2 * kScaledSteps * kFactorsBytes;
  static constexpr int kOffsetRead = kOffsetAhead + kAhead * kAheadBytes;
  static constexpr int kBytes = Base::kUntransposed ? kOffsetRead + 2 * 8 : Base::kBytes;
  static constexpr bool kFits = kBytes <= 227 * 1024;
};

template <Product kProduct, typename T, bool kE5M2, Shape kShape, int kRankStep>
__global__ void __launch_bounds__(BlockTiling<kProduct, kShape, kRankStep>::kThreads, 1)
    fp8_block_gemm_kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
                          const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap residual,
                          const __grid_constant__ Fp8GemmParams params) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = BlockTiling<kProduct, kShape, kRankStep>;
  using Multiplies = std::conditional_t<Tile::kUntransposed, UntransposedConsumer<T, kE5M2, true, Tile, kRankStep>,
                                        Consumer<T, kE5M2, true, Tile, kRankStep>>;
  compute_tiles<T, Tile, Multiplies, kRankStep,
                Tile::kPairs          ? kPartSteps
                : Tile::kUntransposed ? Tile::kScaledSteps
                                      : 1>(left, right, out, residual, params);
#endif
}

template <Product kProduct, typename T, bool kE5M2, Shape kShape, int kRankStep>
void launch_blocks(const Fp8GemmParams& params, cudaStream_t stream) {
  launch_over_tiles<T, BlockTiling<kProduct, kShape, kRankStep>>(
      fp8_block_gemm_kernel<kProduct, T, kE5M2, kShape, kRankStep>, params, stream);
}

}  // namespace
}  // namespace lorakernels
