// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "host/launch_list.h"
#include "ops/bias_dropout_add/params.h"
#include "register.h"

namespace lorakernels {
namespace {

FloatType bias_type(const std::string& name, const std::string& dtype) {
  if (name != dtype && name != "float32") {
    throw std::invalid_argument("bias_dtype must be '" + dtype + "' or 'float32', got '" + name + "'");
  }
  return float_type("bias_dtype", name);
}

void check_shape(const char* op, int64_t rows, int64_t cols) {
  check_sizes(op, {{"rows", rows}, {"cols", cols}});
  if (rows >= int64_t{1} << 31) {
    throw std::invalid_argument(std::string(op) + ": rows must be below 2^31, got " + std::to_string(rows));
  }
}

void forward(uintptr_t out, uintptr_t x, uintptr_t bias, uintptr_t residual, int64_t rows, int64_t cols,
             const std::string& dtype, const std::string& bias_dtype, uintptr_t slot, uint32_t site, uint32_t threshold,
             uint32_t first_row, uint32_t first_col, uintptr_t stream, int device) {
  check_shape("bias_dropout_add", rows, cols);
  const BiasDropoutAddParams params{reinterpret_cast<void*>(out),
                                    reinterpret_cast<const void*>(x),
                                    reinterpret_cast<const void*>(bias),
                                    reinterpret_cast<const void*>(residual),
                                    rows,
                                    cols,
                                    float_type("dtype", dtype),
                                    bias_type(bias_dtype, dtype),
                                    dropout_params(slot, site, threshold, first_row, first_col)};
  submit("bias_dropout_add", params, &launch_bias_dropout_add, stream, device);
}

void backward(uintptr_t dx, uintptr_t dbias, uintptr_t partial, uintptr_t dout, int64_t rows, int64_t cols,
              const std::string& dtype, const std::string& bias_dtype, uintptr_t slot, uint32_t site,
              uint32_t threshold, uint32_t first_row, uint32_t first_col, uintptr_t stream, int device) {
  check_shape("bias_dropout_add_backward", rows, cols);
  if (dbias != 0 && partial == 0) throw std::invalid_argument("partial must be given where dbias is");
  const BiasDropoutAddBackwardParams params{reinterpret_cast<void*>(dx),
                                            reinterpret_cast<void*>(dbias),
                                            reinterpret_cast<float*>(partial),
                                            reinterpret_cast<const void*>(dout),
                                            rows,
                                            cols,
                                            float_type("dtype", dtype),
                                            bias_type(bias_dtype, dtype),
                                            dropout_params(slot, site, threshold, first_row, first_col)};
  submit("bias_dropout_add_backward", params, &launch_bias_dropout_add_backward, stream, device);
}

}  // namespace

void register_bias_dropout_add(py::module_& m) {
  m.def(
      "bias_grad_chunks",
      [](int64_t rows, int64_t cols, int64_t multiprocessors, uint32_t first_col) {
        check_multiprocessors("bias_grad_chunks", multiprocessors);
        return BiasDropoutAddGrid(rows, cols, first_col, true, multiprocessors).grid_y;
      },
      py::arg("rows"), py::arg("cols"), py::arg("multiprocessors"), py::arg("first_col") = 0,
      "Rows of fp32 [chunks, cols] that bias_dropout_add_backward needs for dbias");
  m.def("bias_dropout_add", &forward, py::arg("out"), py::arg("x"), py::arg("bias"), py::arg("residual"),
        py::arg("rows"), py::arg("cols"), py::arg("dtype"), py::arg("bias_dtype"), py::arg("slot"), py::arg("site"),
        py::arg("threshold"), py::arg("first_row"), py::arg("first_col"), py::arg("stream"), py::arg("device"),
        "Device addresses, 0 for a tensor that is not there; out may be x or residual");
  m.def("bias_dropout_add_backward", &backward, py::arg("dx"), py::arg("dbias"), py::arg("partial"), py::arg("dout"),
        py::arg("rows"), py::arg("cols"), py::arg("dtype"), py::arg("bias_dtype"), py::arg("slot"), py::arg("site"),
        py::arg("threshold"), py::arg("first_row"), py::arg("first_col"), py::arg("stream"), py::arg("device"),
        "Device addresses, 0 for a tensor that is not there");
}

}  // namespace lorakernels
