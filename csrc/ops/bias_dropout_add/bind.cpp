// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "bindings/register.h"
#include "bindings/values.h"
#include "host/launch_list.h"
#include "ops/bias_dropout_add/params.h"

namespace lorakernels::bias_dropout_add {
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

void forward(Address out, Address x, Address bias, Address residual, const Sizes& sizes, const Dtypes& dtypes,
             const std::optional<Dropout>& dropout, const Where& where) {
  const auto [rows, cols] = sizes;
  check_shape("bias_dropout_add", rows, cols);
  const BiasDropoutAddParams params{out.as<void>(),
                                    x.as<const void>(),
                                    bias.as<const void>(),
                                    residual.as<const void>(),
                                    rows,
                                    cols,
                                    float_type("dtype", dtypes.first),
                                    bias_type(dtypes.second, dtypes.first),
                                    params_of(dropout)};
  submit("bias_dropout_add", params, &launch_bias_dropout_add, where.stream, where.device);
}

void backward(Address dx, Address dbias, Address partial, Address dout, const Sizes& sizes, const Dtypes& dtypes,
              const std::optional<Dropout>& dropout, const Where& where) {
  const auto [rows, cols] = sizes;
  check_shape("bias_dropout_add_backward", rows, cols);
  if (dbias.value != 0 && partial.value == 0) throw std::invalid_argument("partial must be given where dbias is");
  const BiasDropoutAddBackwardParams params{dx.as<void>(),
                                            dbias.as<void>(),
                                            partial.as<float>(),
                                            dout.as<const void>(),
                                            rows,
                                            cols,
                                            float_type("dtype", dtypes.first),
                                            bias_type(dtypes.second, dtypes.first),
                                            params_of(dropout)};
  submit("bias_dropout_add_backward", params, &launch_bias_dropout_add_backward, where.stream, where.device);
}

}  // namespace

void register_in(py::module_& m) {
  m.def(
      "bias_grad_chunks",
      [](int64_t rows, int64_t cols, int64_t multiprocessors, uint32_t first_col) {
        check_multiprocessors("bias_grad_chunks", multiprocessors);
        return BiasDropoutAddGrid(rows, cols, first_col, true, multiprocessors).grid_y;
      },
      py::arg("rows"), py::arg("cols"), py::arg("multiprocessors"), py::arg("first_col") = 0,
      "Rows of fp32 [chunks, cols] that bias_dropout_add_backward needs for dbias");
  m.def("bias_dropout_add", &forward, py::arg("out"), py::arg("x"), py::arg("bias"), py::arg("residual"),
        py::arg("sizes"), py::arg("dtypes"), py::arg("dropout"), py::arg("where"), "out may be x or residual");
  m.def("bias_dropout_add_backward", &backward, py::arg("dx"), py::arg("dbias"), py::arg("partial"), py::arg("dout"),
        py::arg("sizes"), py::arg("dtypes"), py::arg("dropout"), py::arg("where"));
}

}  // namespace lorakernels::bias_dropout_add
