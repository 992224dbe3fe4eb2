// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_block_kernel.h"

namespace lorakernels {
namespace {

template <typename T, bool kE5M2, Shape kShape>
void launch_of_shape(const Fp8GemmParams& params, cudaStream_t stream) {
  constexpr auto kProduct = Product::kGradInputUntransposed;
  constexpr int kRankStep = BlockTiling<kProduct, kShape, 64>::kFits ? 64 : 32;
  params.rank <= 16 ? launch_blocks<kProduct, T, kE5M2, kShape, 16>(params, stream)
                    : launch_blocks<kProduct, T, kE5M2, kShape, kRankStep>(params, stream);
}

template <typename T, bool kE5M2>
void launch_of_format(const Fp8GemmParams& params, cudaStream_t stream) {
  params.tile_rows == 256   ? launch_of_shape<T, kE5M2, Shape::kTallest>(params, stream)
  : params.tile_rows == 192 ? launch_of_shape<T, kE5M2, Shape::kTall>(params, stream)
                            : launch_of_shape<T, kE5M2, Shape::kSmall>(params, stream);
}

template <typename T>
void launch_of_type(const Fp8GemmParams& params, cudaStream_t stream) {
  params.is_e5m2 ? launch_of_format<T, true>(params, stream) : launch_of_format<T, false>(params, stream);
}

}  // namespace

void launch_fp8_block_grad_input(const Fp8GemmParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  params.dtype == FloatType::kBFloat16 ? launch_of_type<__nv_bfloat16>(params, on) : launch_of_type<__half>(params, on);
}

}  // namespace lorakernels
