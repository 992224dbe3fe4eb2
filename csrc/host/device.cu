// SPDX-License-Identifier: Apache-2.0
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
  const int device = current();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const Device asked{attribute(cudaDevAttrComputeCapabilityMajor, device),
                     attribute(cudaDevAttrComputeCapabilityMinor, device),
                     attribute(cudaDevAttrMultiProcessorCount, device)};
  return known.emplace(device, asked).first->second;
}

void allow_shared_memory(const void* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;
  const std::pair<const void*, int> key{kernel, current()};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allowed.find(key);
  if (found != allowed.end() && found->second >= bytes) return;
  LORAKERNELS_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed[key] = bytes;
}

}  // namespace lorakernels
