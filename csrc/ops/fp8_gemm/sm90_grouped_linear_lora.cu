// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8_gemm/sm90_kernel.h"

namespace lorakernels {

void launch_grouped_linear_lora(const Fp8GemmParams& params, void* stream, int device) {
  using T = __nv_bfloat16;
  constexpr auto kLinear = Product::kLinear;
  if (params.rows == 0 || params.cols == 0) return;
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  if (params.tile_cols == 128) {
    launch<kLinear, T, false, false, Shape::kSmall, 64, true>(params, on);
  } else {
    params.rank <= 16 ? launch<kLinear, T, false, false, Shape::kWide, 16, true>(params, on)
                      : launch<kLinear, T, false, false, Shape::kWide, 64, true>(params, on);
  }
}

}  // namespace lorakernels
