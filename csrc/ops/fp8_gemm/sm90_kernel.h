// SPDX-License-Identifier: Apache-2.0
// For .cu files only: the kernel behind params.h.
//
// One block per multiprocessor walks over the tiles of the output. Its first warpgroup fetches. Warp 0 has the tensor
// copy engine fill a ring of operand tiles. Warps 1 to 3 fetch u, v, scales and bias meanwhile, and draw the tile's
// mask. The tensor cores need not wait for them. The other warpgroups multiply 64 rows of the tile each and
// write their results to shared memory. The copy engine stores them from there while the next tile is multiplied. A
// residual is copied into that same shared memory before.
#pragma once

#include <algorithm>

#include "device/overlap.h"
#include "device/ptx/threads.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/fp8_gemm/sm90_fetch.h"
#include "ops/fp8_gemm/sm90_multiply.h"
#include "ops/fp8_gemm/sm90_untransposed.h"

namespace lorakernels {
namespace {

// What a block of the kernel does. kMultiple: of steps along depth.
template <typename T, typename Tile, typename Multiplies, int kRankStep, int kMultiple>
__device__ __forceinline__ void compute_tiles(const CUtensorMap& left, const CUtensorMap& right, const CUtensorMap& out,
                                              const CUtensorMap& residual, const Fp8GemmParams& params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared), barriers = base + Tile::kOffsetBarriers;
  if (threadIdx.x == 0) {
    TileRing<Tile::kStages, Tile::kStageBytes> ring(base, barriers);
    for (; ring.round == 0; ring.advance()) {
      init_barrier(ring.full(), 1);
      init_barrier(ring.empty(), Tile::kConsumers * 4);
    }
    init_barrier(barriers + Tile::kExtras * 8, kHelpers);
    init_barrier(barriers + Tile::kExtras * 8 + 8, Tile::kConsumers * 128);
    for (int i = 0; Tile::kLinear && i < Tile::kConsumers * 4; ++i) {
      init_barrier(barriers + (Tile::kResiduals + i) * 8, 1);
    }
    fence_barrier_init();
  }
  __syncthreads();
  begin_after_previous_kernel();
  const Extras<Tile, kRankStep> extras(barriers + Tile::kExtras * 8, params, Multiplies::kFills);
  if (threadIdx.x < 128) {
    if constexpr (!Tile::kLow) give_registers<Tile::kProducerRegisters>();
    if (threadIdx.x == 0) {
      copy_operands<Tile, kMultiple>(params, left, right, base);
    } else if (threadIdx.x >= 32 && extras.any) {
      Helper<T, Tile, kRankStep>(params, base).fetch_tiles(extras);
    }
  } else {
    if constexpr (!Tile::kLow) take_registers<Tile::kConsumerRegisters>();  // else a thread has as many as there can be
    Multiplies(params, base).work(out, residual, extras);
  }
}

template <typename T, typename Tile, typename Kernel>
void launch_over_tiles(const Kernel& kernel, const Fp8GemmParams& params, cudaStream_t stream) {
  static_assert(Tile::kFits);
  const int64_t tiles =
      static_cast<int64_t>(Tiles<Tile>::count(params.rows, Tile::kRows)) * Tiles<Tile>::count(params.cols, Tile::kCols);
  const auto blocks = static_cast<unsigned>(std::min(tiles, params.multiprocessors));
  const int64_t groups = Tile::kGrouped ? weights_of(params) : 1;
  const auto result = [&](const void* data) {
    constexpr int kRows = Tile::kUntransposed ? 64 : kBoxRows;
    return data == nullptr ? CUtensorMap{} : tensor_map<T>(data, params.rows, params.cols, kRows);
  };
  launch_kernel(kernel, blocks, Tile::kThreads, Tile::kBytes, stream, true,
                tensor_map<uint8_t>(params.left, params.rows, params.depth, Tile::kRows),
                Tile::kUntransposed
                    ? tensor_map<uint8_t>(params.right, groups * params.depth, params.cols, kStepDepth)
                    : tensor_map<uint8_t>(params.right, groups * params.cols, params.depth, Tile::kCols),
                result(params.out), result(params.residual), params);
}

template <Product kProduct, typename T, bool kE5M2, bool kSplits, Shape kShape, int kRankStep, bool kGrouped>
__global__ void __launch_bounds__(Tiling<kProduct, kShape, kRankStep, kGrouped>::kThreads, 1)
    fp8_gemm_kernel(const __grid_constant__ CUtensorMap left, const __grid_constant__ CUtensorMap right,
                    const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap residual,
                    const __grid_constant__ Fp8GemmParams params) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = Tiling<kProduct, kShape, kRankStep, kGrouped>;
  using Multiplies = std::conditional_t<Tile::kUntransposed, UntransposedConsumer<T, kE5M2, kSplits, Tile, kRankStep>,
                                        Consumer<T, kE5M2, kSplits, Tile, kRankStep>>;
  constexpr int kMultiple = kSplits ? kPartSteps : Tile::kUntransposed ? 2 : 1;
  compute_tiles<T, Tile, Multiplies, kRankStep, kMultiple>(left, right, out, residual, params);
#endif
}

template <Product kProduct, typename T, bool kE5M2, bool kSplits, Shape kShape, int kRankStep, bool kGrouped = false>
void launch(const Fp8GemmParams& params, cudaStream_t stream) {
  launch_over_tiles<T, Tiling<kProduct, kShape, kRankStep, kGrouped>>(
      fp8_gemm_kernel<kProduct, T, kE5M2, kSplits, kShape, kRankStep, kGrouped>, params, stream);
}

template <Product kProduct, typename T, bool kE5M2, bool kSplits>
void launch_tiled(const Fp8GemmParams& params, cudaStream_t stream) {
  const auto large = [&](auto shape) {
    constexpr Shape kShape = decltype(shape)::value;
    constexpr int kRankStep = Tiling<kProduct, kShape, 64>::kFits ? 64 : 32;
    params.rank <= 16 ? launch<kProduct, T, kE5M2, kSplits, kShape, 16>(params, stream)
                      : launch<kProduct, T, kE5M2, kSplits, kShape, kRankStep>(params, stream);
  };
  if (params.tile_rows == 64) {
    if constexpr (kProduct == Product::kLinear && !kSplits) {
      launch<kProduct, T, kE5M2, kSplits, Shape::kLow, 64>(params, stream);
    }
  } else if (params.tile_rows * params.tile_cols == 128 * 128) {
    launch<kProduct, T, kE5M2, kSplits, Shape::kSmall, 64>(params, stream);
  } else if constexpr (kSplits) {
    large(std::integral_constant<Shape, Shape::kTall>());
  } else {
    constexpr bool kUntransposed = kProduct == Product::kGradInputUntransposed;
    large(std::integral_constant<Shape, kUntransposed ? Shape::kTallest : Shape::kWide>());
  }
}

template <Product kProduct, typename T, bool kE5M2>
void launch_split_or_not(const Fp8GemmParams& params, cudaStream_t stream) {
  params.splits ? launch_tiled<kProduct, T, kE5M2, true>(params, stream)
                : launch_tiled<kProduct, T, kE5M2, false>(params, stream);
}

}  // namespace
}  // namespace lorakernels
