// SPDX-License-Identifier: Apache-2.0
// For .cu files only: a failed CUDA call becomes an exception that names the call.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace lorakernels {

inline void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
}

#define LORAKERNELS_CHECK_CUDA(call) ::lorakernels::check_cuda((call), #call)
#define LORAKERNELS_CHECK_LAUNCH(kernel) ::lorakernels::check_cuda(cudaGetLastError(), "launch of " kernel)

// Makes a device the current one for its lifetime; -1 keeps the current one. A stream belongs to a device, and a launch
// on it fails or goes to the wrong GPU while another device is current.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (device < 0) return;
    LORAKERNELS_CHECK_CUDA(cudaGetDevice(&previous_));
    if (previous_ == device) {
      previous_ = -1;
    } else {
      LORAKERNELS_CHECK_CUDA(cudaSetDevice(device));
    }
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// Calls of the driver need a context. A thread that has called no CUDA yet, as autograd's at its first backward, has
// none.
inline void bind_context() {
  thread_local bool bound = false;
  if (bound) return;
  int device = 0;
  LORAKERNELS_CHECK_CUDA(cudaGetDevice(&device));
  LORAKERNELS_CHECK_CUDA(cudaSetDevice(device));
  bound = true;
}

}  // namespace lorakernels
