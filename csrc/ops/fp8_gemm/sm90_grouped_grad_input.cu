// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_kernel.h"

namespace lorakernels {
namespace {

template <bool kE5M2>
void launch_split_or_fast(const Fp8GemmParams& params, cudaStream_t stream) {
  using T = __nv_bfloat16;
  constexpr auto kProduct = Product::kGradInputUntransposed;
  params.splits ? launch<kProduct, T, kE5M2, true, Shape::kSmall, 64, true>(params, stream)
                : launch<kProduct, T, kE5M2, false, Shape::kSmall, 64, true>(params, stream);
}

}  // namespace

void launch_grouped_grad_input(const Fp8GemmParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  params.is_e5m2 ? launch_split_or_fast<true>(params, on) : launch_split_or_fast<false>(params, on);
}

}  // namespace lorakernels
