// SPDX-License-Identifier: Apache-2.0
// Stands in for the .cu files in a build without nvcc: the same functions, each saying what is missing.
#include <stdexcept>
#include <string>

#include "amax.h"
#include "amax_and_scale_update.h"
#include "bias_dropout_add.h"
#include "cuda_runtime_info.h"
#include "dropout_mask.h"
#include "quantize_grad.h"
#include "quantize_lora_down.h"

namespace lorakernels {
namespace {

[[noreturn]] void not_compiled(const char* op) {
  throw std::runtime_error(std::string(op) +
                           ": lorakernels._C was built without CUDA; reinstall with nvcc on PATH or in CUDA_HOME");
}

}  // namespace

void launch_amax_if_unset(const ScaleSource&, const void*, int64_t, FloatType, void*, int) {
  not_compiled("amax_if_unset");
}

void launch_amax_and_scale_update(const AmaxAndScaleUpdateParams&, void*, int) {
  not_compiled("amax_and_scale_update");
}

void launch_bias_dropout_add(const BiasDropoutAddParams&, void*, int) { not_compiled("bias_dropout_add"); }

void launch_bias_dropout_add_backward(const BiasDropoutAddBackwardParams&, void*, int) {
  not_compiled("bias_dropout_add_backward");
}

void launch_quantize_grad(const QuantizeGradParams&, void*, int) { not_compiled("quantize_grad"); }

void launch_quantize_lora_down(const QuantizeLoraDownParams&, void*, int) { not_compiled("quantize_lora_down"); }

void launch_dropout_mask(const DropoutMaskParams&, void*, int) { not_compiled("dropout_mask"); }

CudaRuntimeInfo cuda_runtime_info() {
  CudaRuntimeInfo info;
  info.error = "lorakernels._C was built without CUDA";
  return info;
}

}  // namespace lorakernels
