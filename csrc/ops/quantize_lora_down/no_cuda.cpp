// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/quantize_lora_down/params.h"

namespace lorakernels {

QuantizeLoraDownPlan quantize_lora_down_plan(int64_t, int64_t, int64_t, int) { not_compiled("quantize_lora_down"); }
void launch_quantize_lora_down(const QuantizeLoraDownParams&, void*, int) { not_compiled("quantize_lora_down"); }

}  // namespace lorakernels
