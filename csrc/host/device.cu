// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "host/cuda_check.h"
#include "host/device.h"

namespace lorakernels {
namespace {

int current() {
  int device = 0;
  LORAKERNELS_CHECK_CUDA(cudaGetDevice(&device));
  return device;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  LORAKERNELS_CHECK_CUDA(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

}  // namespace

Device current_device() {
  static std::mutex mutex;
  static std::map<int, Device> known;
  thread_local int last = -1;  // what a thread asked last, it is told without a lock
  thread_local Device answer{};
  const int device = current();
  if (device == last) return answer;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    const Device asked{attribute(cudaDevAttrComputeCapabilityMajor, device),
                       attribute(cudaDevAttrComputeCapabilityMinor, device),
                       attribute(cudaDevAttrMultiProcessorCount, device)};
    found = known.emplace(device, asked).first;
  }
  last = device;
  return answer = found->second;
}

cudaFunction_t function_of(const void* kernel, int shared_bytes) {
  struct Known {
    cudaFunction_t function{};
    int bytes = 0;
  };
  struct Last {
    const void* kernel = nullptr;
    int device = -1;
    Known known;
  };
  constexpr size_t kPlaces = 64;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Known> functions;
  thread_local Last places[kPlaces];  // as of `current_device`, for the kernels that a thread launches
  const int device = current();
  Last& last = places[reinterpret_cast<uintptr_t>(kernel) / 16 % kPlaces];
  if (last.kernel == kernel && last.device == device && last.known.bytes >= shared_bytes) return last.known.function;
  const std::lock_guard<std::mutex> lock(mutex);
  Known known = functions[{kernel, device}];
  if (known.bytes < shared_bytes) {
    LORAKERNELS_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    known.bytes = shared_bytes;
  }
  if (known.function == cudaFunction_t{}) LORAKERNELS_CHECK_CUDA(cudaGetFuncBySymbol(&known.function, kernel));
  last = {kernel, device, known};
  functions[{kernel, device}] = known;
  return known.function;
}

}  // namespace lorakernels
