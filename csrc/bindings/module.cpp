// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "lorakernels' C++/CUDA part: raw addresses, sizes and a stream in, nothing of torch";
  lorakernels::register_amax(m);
  lorakernels::register_build_info(m);
  lorakernels::register_philox(m);
  lorakernels::register_dropout_mask(m);
  lorakernels::register_fp8(m);
  lorakernels::register_graph(m);
  lorakernels::register_graph_watch(m);
  lorakernels::register_fp8_gemm(m);
  lorakernels::register_amax_and_scale_update(m);
  lorakernels::register_bias_dropout_add(m);
  lorakernels::register_quantize_grad(m);
  lorakernels::register_quantize_lora_down(m);
  lorakernels::register_longest_document(m);
  lorakernels::register_lora_grad_a(m);
  lorakernels::register_transpose_fp8(m);
  lorakernels::register_launch_list(m);
}
