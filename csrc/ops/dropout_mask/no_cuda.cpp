// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/dropout_mask/params.h"

namespace lorakernels {

void launch_dropout_mask(const DropoutMaskParams&, void*, int) { not_compiled("dropout_mask"); }
void launch_dropped_bits(const DroppedBitsParams&, void*, int) { not_compiled("dropped_bits"); }

}  // namespace lorakernels
