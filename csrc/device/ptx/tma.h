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

// A box of the tensor that `map` describes, to shared memory; what lies outside the tensor becomes zeros.
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

// The way back; what lies outside the tensor is left out. Of one thread's committed stores the last call tells that all
// have been read from shared memory.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int col, int row, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(col),
               "r"(row), "r"(source)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace lorakernels
