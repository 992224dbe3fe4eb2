// SPDX-License-Identifier: Apache-2.0
#include "host/not_compiled.h"
#include "ops/bias_dropout_add/params.h"

namespace lorakernels {

void launch_bias_dropout_add(const BiasDropoutAddParams&, void*, int) { not_compiled("bias_dropout_add"); }

void launch_bias_dropout_add_backward(const BiasDropoutAddBackwardParams&, void*, int) {
  not_compiled("bias_dropout_add_backward");
}

}  // namespace lorakernels
