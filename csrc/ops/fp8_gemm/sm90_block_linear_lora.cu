// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_block_kernel.h"

namespace lorakernels {
namespace {

template <typename T>
void launch_of_type(const Fp8GemmParams& params, cudaStream_t stream) {
  constexpr auto kProduct = Product::kLinear;
  constexpr int kRankStep = BlockTiling<kProduct, Shape::kWide, 64>::kFits ? 64 : 32;
  if (params.tile_cols == 128) return launch_blocks<kProduct, T, false, Shape::kSmall, 64>(params, stream);
  params.rank <= 16 ? launch_blocks<kProduct, T, false, Shape::kWide, 16>(params, stream)
                    : launch_blocks<kProduct, T, false, Shape::kWide, kRankStep>(params, stream);
}

}  // namespace

void launch_fp8_block_linear(const Fp8GemmParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  params.dtype == FloatType::kBFloat16 ? launch_of_type<__nv_bfloat16>(params, on) : launch_of_type<__half>(params, on);
}

}  // namespace lorakernels
