// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/transpose_fp8/params.h"

namespace lorakernels {

void launch_transpose_fp8(const TransposeFp8Params&, void*, int) { not_compiled("transpose_fp8"); }

}  // namespace lorakernels
