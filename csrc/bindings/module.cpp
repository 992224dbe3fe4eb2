// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "lorakernels' C++/CUDA part: raw addresses, sizes and a stream in, nothing of torch";
  lorakernels::amax::register_in(m);
  lorakernels::register_build_info(m);
  lorakernels::register_philox(m);
  lorakernels::dropout_mask::register_in(m);
  lorakernels::register_fp8(m);
  lorakernels::register_graph(m);
  lorakernels::register_graph_watch(m);
  lorakernels::fp8_gemm::register_in(m);
  lorakernels::amax_and_scale_update::register_in(m);
  lorakernels::bias_dropout_add::register_in(m);
  lorakernels::quantize_grad::register_in(m);
  lorakernels::quantize_lora_down::register_in(m);
  lorakernels::longest_document::register_in(m);
  lorakernels::lora_grad_a::register_in(m);
  lorakernels::transpose_fp8::register_in(m);
  lorakernels::register_launch_list(m);
}
