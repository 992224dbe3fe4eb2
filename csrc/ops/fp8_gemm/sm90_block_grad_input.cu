// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_block_kernel.h"

namespace lorakernels {
namespace {

template <typename T, bool kE5M2>
void launch_of_format(const Fp8GemmParams& params, cudaStream_t stream) {
  constexpr auto kProduct = Product::kGradInput;
  if (params.tile_cols == 128) return launch_blocks<kProduct, T, kE5M2, Shape::kSmall, 64>(params, stream);
  params.rank <= 16 ? launch_blocks<kProduct, T, kE5M2, Shape::kWide, 16>(params, stream)
                    : launch_blocks<kProduct, T, kE5M2, Shape::kWide, 64>(params, stream);
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
