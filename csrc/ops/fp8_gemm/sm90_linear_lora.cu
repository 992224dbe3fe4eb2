// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_kernel.h"

namespace lorakernels {

void launch_fp8_linear_lora(const Fp8GemmParams& params, void* stream, int device) {
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  params.dtype == FloatType::kBFloat16 ? launch_split_or_not<Product::kLinear, __nv_bfloat16, false>(params, on)
                                       : launch_split_or_not<Product::kLinear, __half, false>(params, on);
}

}  // namespace lorakernels
