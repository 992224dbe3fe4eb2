// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/fp8_gemm/params.h"

namespace lorakernels {

void launch_fp8_linear_lora(const Fp8GemmParams&, void*, int) { not_compiled("fp8_linear_lora"); }
void launch_fp8_grad_input(const Fp8GemmParams&, void*, int) { not_compiled("fp8_grad_input"); }
void launch_grouped_linear_lora(const Fp8GemmParams&, void*, int) { not_compiled("grouped_linear_lora"); }
void launch_grouped_grad_input(const Fp8GemmParams&, void*, int) { not_compiled("grouped_grad_input"); }
void launch_fp8_block_linear(const Fp8GemmParams&, void*, int) { not_compiled("fp8_block_linear"); }
void launch_fp8_block_grad_input(const Fp8GemmParams&, void*, int) { not_compiled("fp8_block_grad_input"); }

}  // namespace lorakernels
