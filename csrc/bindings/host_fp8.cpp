// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "bindings/register.h"
#include "device/fp8.h"

namespace lorakernels {
namespace {

template <typename Format>
void encode(const float* in, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = fp8_encode<Format>(in[i]);
}

template <typename Format>
void decode(const uint8_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = fp8_decode<Format>(in[i]);
}

[[noreturn]] void unknown_format(const std::string& format) {
  throw std::invalid_argument("format must be 'e4m3fn' or 'e5m2', got '" + format + "'");
}

void encode_host(uintptr_t in, uintptr_t out, int64_t n, const std::string& format) {
  check_sizes("fp8_encode", {{"n", n}});
  const auto* from = reinterpret_cast<const float*>(in);
  auto* to = reinterpret_cast<uint8_t*>(out);
  if (format == "e4m3fn") return encode<E4M3>(from, to, n);
  if (format == "e5m2") return encode<E5M2>(from, to, n);
  unknown_format(format);
}

void decode_host(uintptr_t in, uintptr_t out, int64_t n, const std::string& format) {
  check_sizes("fp8_decode", {{"n", n}});
  const auto* from = reinterpret_cast<const uint8_t*>(in);
  auto* to = reinterpret_cast<float*>(out);
  if (format == "e4m3fn") return decode<E4M3>(from, to, n);
  if (format == "e5m2") return decode<E5M2>(from, to, n);
  unknown_format(format);
}

}  // namespace

void register_fp8(py::module_& m) {
  m.def("fp8_encode", &encode_host, py::arg("src"), py::arg("out"), py::arg("n"), py::arg("format"),
        py::call_guard<py::gil_scoped_release>(),
        "n floats at the host address src -> n FP8 bytes at out, saturating, round to nearest even");
  m.def("fp8_decode", &decode_host, py::arg("src"), py::arg("out"), py::arg("n"), py::arg("format"),
        py::call_guard<py::gil_scoped_release>(), "n FP8 bytes at the host address src -> n floats at out, exact");
}

}  // namespace lorakernels
