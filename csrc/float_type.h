// SPDX-License-Identifier: Apache-2.0
// The dtypes that ops compute in, by torch's names in the bindings.
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

}  // namespace lorakernels
