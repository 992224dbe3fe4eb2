// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/quantize_grad/params.h"

namespace lorakernels {

void launch_quantize_grad(const QuantizeGradParams&, void*, int) { not_compiled("quantize_grad"); }

}  // namespace lorakernels
