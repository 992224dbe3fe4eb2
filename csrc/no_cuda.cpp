// SPDX-License-Identifier: Apache-2.0
// Takes the place of the .cu files in a build without nvcc. Each function throws and says what is missing.
#include <stdexcept>
#include <string>

#include "graphs/graph.h"
#include "host/cuda_runtime_info.h"
#include "host/kernel_launch.h"
#include "ops/amax/params.h"
#include "ops/amax_and_scale_update/params.h"
#include "ops/bias_dropout_add/params.h"
#include "ops/dropout_mask/params.h"
#include "ops/fp8_gemm/params.h"
#include "ops/longest_document/params.h"
#include "ops/lora_grad_a/params.h"
#include "ops/quantize_grad/params.h"
#include "ops/quantize_lora_down/params.h"
#include "ops/transpose_fp8/params.h"

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

void launch_fp8_linear_lora(const Fp8GemmParams&, void*, int) { not_compiled("fp8_linear_lora"); }

void launch_fp8_grad_input(const Fp8GemmParams&, void*, int) { not_compiled("fp8_grad_input"); }
void launch_fp8_grad_input_untransposed(const Fp8GemmParams&, void*, int) { not_compiled("fp8_grad_input"); }

void launch_grouped_linear_lora(const Fp8GemmParams&, void*, int) { not_compiled("grouped_linear_lora"); }
void launch_grouped_grad_input(const Fp8GemmParams&, void*, int) { not_compiled("grouped_grad_input"); }

void launch_fp8_block_linear(const Fp8GemmParams&, void*, int) { not_compiled("fp8_block_linear"); }
void launch_fp8_block_grad_input(const Fp8GemmParams&, void*, int) { not_compiled("fp8_block_grad_input"); }

void launch_quantize_grad(const QuantizeGradParams&, void*, int) { not_compiled("quantize_grad"); }

QuantizeLoraDownPlan quantize_lora_down_plan(int64_t, int64_t, int64_t, int) { not_compiled("quantize_lora_down"); }

void launch_quantize_lora_down(const QuantizeLoraDownParams&, void*, int) { not_compiled("quantize_lora_down"); }

void launch_longest_document(const LongestDocumentParams&, void*, int) { not_compiled("check_longest_document"); }

void launch_lora_grad_a(const LoraGradAParams&, void*, int) { not_compiled("lora_grad_a"); }

void launch_transpose_fp8(const TransposeFp8Params&, void*, int) { not_compiled("transpose_fp8"); }

void launch_dropout_mask(const DropoutMaskParams&, void*, int) { not_compiled("dropout_mask"); }
void launch_dropped_bits(const DroppedBitsParams&, void*, int) { not_compiled("dropped_bits"); }

void LaunchList::launch(const LaunchValues&, void*, int) const { not_compiled("LaunchList.run"); }
void KernelLaunch::run(const LaunchValues&, void*) const { not_compiled("LaunchList.run"); }

void Graph::instantiate() { not_compiled("Graph.instantiate"); }
void Graph::upload(uintptr_t) { not_compiled("Graph.upload"); }
void Graph::launch(uintptr_t) const { not_compiled("Graph.launch"); }
std::string Graph::update(Graph&) { not_compiled("Graph.update"); }
std::vector<NodeCount> Graph::census() const { not_compiled("Graph.census"); }
int64_t Graph::programmatic_edges() const { not_compiled("Graph.programmatic_edges"); }
void Graph::write_dot(const std::string&) const { not_compiled("Graph.write_dot"); }
void Graph::destroy() noexcept {}
void begin_capture(uintptr_t, CaptureMode) { not_compiled("graph_begin_capture"); }
void* end_capture(uintptr_t) { not_compiled("graph_end_capture"); }
bool abort_capture(uintptr_t) noexcept { return false; }

CudaRuntimeInfo cuda_runtime_info() {
  CudaRuntimeInfo info;
  info.error = "lorakernels._C was built without CUDA";
  return info;
}

}  // namespace lorakernels
