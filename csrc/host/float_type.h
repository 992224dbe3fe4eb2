// SPDX-License-Identifier: Apache-2.0
// The dtypes that ops compute in. The bindings take them by torch's names.
#pragma once

#include <stdexcept>
#include <string>

namespace lorakernels {

enum class FloatType { kFloat32, kBFloat16, kFloat16 };

inline FloatType float_type(const char* argument, const std::string& name) {
  if (name == "float32") return FloatType::kFloat32;
  if (name == "bfloat16") return FloatType::kBFloat16;
  if (name == "float16") return FloatType::kFloat16;
  throw std::invalid_argument(std::string(argument) + " must be 'float32', 'bfloat16' or 'float16', got '" + name +
                              "'");
}

inline FloatType half_type(const char* argument, const std::string& name) {
  const FloatType type = float_type(argument, name);
  if (type == FloatType::kFloat32) {
    throw std::invalid_argument(std::string(argument) + " must be 'bfloat16' or 'float16', got 'float32'");
  }
  return type;
}

inline bool is_e5m2(const char* argument, const std::string& format) {
  if (format != "e5m2" && format != "e4m3fn") {
    throw std::invalid_argument(std::string(argument) + " must be 'e5m2' or 'e4m3fn', got '" + format + "'");
  }
  return format == "e5m2";
}

}  // namespace lorakernels
