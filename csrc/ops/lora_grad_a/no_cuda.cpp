// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/lora_grad_a/params.h"

namespace lorakernels {

void launch_lora_grad_a(const LoraGradAParams&, void*, int) { not_compiled("lora_grad_a"); }

}  // namespace lorakernels
