// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/amax/params.h"

namespace lorakernels {

void launch_amax_if_unset(const ScaleSource&, const void*, int64_t, FloatType, void*, int) {
  not_compiled("amax_if_unset");
}

}  // namespace lorakernels
