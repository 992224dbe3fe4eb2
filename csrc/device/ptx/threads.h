// SPDX-License-Identifier: Apache-2.0
// For .cu files only: barriers of some of a block's threads, and the registers of a warpgroup.
#pragma once

#include <cstdint>

namespace lorakernels {

// Waits for kThreads threads of the block at a barrier, 1 to 15; __syncthreads() uses 0.
template <int kThreads>
__device__ __forceinline__ void sync_some_threads(uint32_t barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// How many registers kWarpgroups warpgroups share, by a thread of each: what a block with the multiprocessor to itself
// is launched with. A thread gets 8 at a time, so that three warpgroups have 504 and not 512.
template <int kWarpgroups>
constexpr int registers_of_warpgroups() {
  return kWarpgroups * (65536 / (kWarpgroups * 128) / 8 * 8);
}

// Sets how many registers each thread of this warpgroup has, a multiple of 8 (PTX ISA, "setmaxnreg"). take_registers
// waits until other warpgroups have given enough.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace lorakernels
