// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/overlap.h"
#include "host/launch.h"
#include "ops/amax/device.h"

namespace lorakernels {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // 16-byte loads of a thread at a time

__device__ uint32_t widened(uint32_t bits, FloatType dtype) {
  const auto half = static_cast<unsigned short>(bits);
  return dtype == FloatType::kBFloat16 ? bits << 16 : __float_as_uint(__half2float(__ushort_as_half(half)));
}

__global__ void __launch_bounds__(kThreads, 2)
    amax_if_unset_kernel(const ScaleSource source, const uint4* x, int64_t groups, FloatType dtype) {
  __shared__ uint32_t of_warp[kThreads / 32];
  begin_after_previous_kernel();
  if (source.kept != nullptr && *source.kept > 0.0f) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t most = 0;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < groups; at += kInFlight * step) {
    uint4 loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      loaded[i] = at + i * step < groups ? x[at + i * step] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      for (const uint32_t word : {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w}) most = max_magnitude(most, word);
    }
  }
  most = warp_max_magnitude(most);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  most = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0);
  if (threadIdx.x == 0) source.partials[blockIdx.x] = widened(most, dtype);
}

}  // namespace

void launch_amax_if_unset(const ScaleSource& source, const void* x, int64_t count, FloatType dtype, void* stream,
                          int device) {
  const DeviceGuard guard(device);
  launch_kernel(amax_if_unset_kernel, ScaleSource::kPartials, kThreads, 0, static_cast<cudaStream_t>(stream), true,
                source, static_cast<const uint4*>(x), count / 8, dtype);
}

}  // namespace lorakernels
