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

void allow_shared_memory(const void* kernel, int bytes) {
  struct Allowed {
    const void* kernel = nullptr;
    int device = -1, bytes = 0;
  };
  constexpr size_t kPlaces = 64;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;
  thread_local Allowed places[kPlaces];  // as of `current_device`, for the kernels that a thread launches
  const int device = current();
  Allowed& last = places[reinterpret_cast<uintptr_t>(kernel) / 16 % kPlaces];
  if (last.kernel == kernel && last.device == device && last.bytes >= bytes) return;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{kernel, device}];
  if (most < bytes) {
    LORAKERNELS_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    most = bytes;
  }
  last = {kernel, device, most};
}

}  // namespace lorakernels
