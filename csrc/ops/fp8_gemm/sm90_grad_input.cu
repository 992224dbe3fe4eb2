// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_kernel.h"

namespace lorakernels {
namespace {

template <typename T>
void launch_of_type(const Fp8GemmParams& params, cudaStream_t stream) {
  params.is_e5m2 ? launch_split_or_not<Product::kGradInputUntransposed, T, true>(params, stream)
                 : launch_split_or_not<Product::kGradInputUntransposed, T, false>(params, stream);
}

}  // namespace

void launch_fp8_grad_input(const Fp8GemmParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  params.dtype == FloatType::kBFloat16 ? launch_of_type<__nv_bfloat16>(params, static_cast<cudaStream_t>(stream))
                                       : launch_of_type<__half>(params, static_cast<cudaStream_t>(stream));
}

}  // namespace lorakernels
