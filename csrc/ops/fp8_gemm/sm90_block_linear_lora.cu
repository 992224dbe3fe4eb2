// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_block_kernel.h"

namespace lorakernels {
namespace {

template <typename T, Shape kShape>
void launch_of_shape(const Fp8GemmParams& params, cudaStream_t stream) {
  constexpr auto kProduct = Product::kLinear;
  constexpr int kRankStep = BlockTiling<kProduct, kShape, 64>::kFits ? 64 : 32;
  params.rank <= 16 ? launch_blocks<kProduct, T, false, kShape, 16>(params, stream)
                    : launch_blocks<kProduct, T, false, kShape, kRankStep>(params, stream);
}

template <typename T>
void launch_of_type(const Fp8GemmParams& params, cudaStream_t stream) {
  if (params.tile_rows == 192) return launch_of_shape<T, Shape::kTall>(params, stream);
  if (params.tile_cols == 256) return launch_of_shape<T, Shape::kWide>(params, stream);
  launch_blocks<Product::kLinear, T, false, Shape::kSmall, 64>(params, stream);
}

}  // namespace

void launch_fp8_block_linear(const Fp8GemmParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  params.dtype == FloatType::kBFloat16 ? launch_of_type<__nv_bfloat16>(params, on) : launch_of_type<__half>(params, on);
}

}  // namespace lorakernels
