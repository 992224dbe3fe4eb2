// SPDX-License-Identifier: Apache-2.0
// For .cu files only: boxes of a matrix copied to and from shared memory by the tensor copy engine of sm_90 and later
// (PTX ISA, "cp.async.bulk.tensor").
#pragma once

#include <cuda.h>

#include <cstdint>

namespace lorakernels {

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Asks the L2 cache for all 16-byte pieces that lie within `bytes` bytes. What others write meanwhile is what it has.
__device__ __forceinline__ void prefetch_bytes(const void* data, int64_t bytes) {
  const uint64_t first = reinterpret_cast<uint64_t>(data), begin = (first + 15) & ~uint64_t{15};
  const int64_t whole = static_cast<int64_t>((first + bytes - begin) & ~uint64_t{15});
  if (whole <= 0) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(static_cast<uint32_t>(whole)) : "memory");
}

// Starts to copy a box of the matrix that `map` describes to shared memory, with zeros outside of the matrix. `barrier`
// counts its bytes.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap& map, int col, int row, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], "
      "[%4], %5;" ::"r"(target),
      "l"(&map), "r"(col), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap& map, int col, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(&map), "r"(col), "r"(row), "r"(barrier)
      : "memory");
}

// Starts to copy a box from shared memory into the matrix, without what lies outside of it. After commit_stores(), the
// same thread's wait_for_stores_to_read() returns when shared memory may be overwritten.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int col, int row, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(col),
               "r"(row), "r"(source)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Of all groups but the newest `kPending`.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace lorakernels
