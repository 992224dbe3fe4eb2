// SPDX-License-Identifier: Apache-2.0
// What a build without nvcc has in place of .cu files: in each folder that has some, a no_cuda.cpp.
#pragma once

#include <stdexcept>
#include <string>

namespace lorakernels {

[[noreturn]] inline void not_compiled(const char* op) {
  throw std::runtime_error(std::string(op) +
                           ": lorakernels._C was built without CUDA; reinstall with nvcc on PATH or in CUDA_HOME");
}

}  // namespace lorakernels
