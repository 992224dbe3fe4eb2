// SPDX-License-Identifier: Apache-2.0
// For .cu files only: shared memory filled by Hopper's tensor copy engine, and the barriers that say when.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "device/ptx/cp_async.h"
#include "host/cuda_check.h"

namespace lorakernels {

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\n"
      "bra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
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

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_float(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ float2 load_floats(uint32_t address) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(address) : "memory");
  return two;
}

// Four matrices of 8 × 8 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and holds in word i
// the elements 2 (l % 4) and the next of row l / 4 of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

// A ring of tiles in shared memory, a full and an empty barrier to each stage: the stage in use, and how often, modulo
// 2, the ring has gone round.
template <int kStages, int kStageBytes>
struct TileRing {
  uint32_t tiles, barriers;
  int stage = 0, round = 0;

  __device__ TileRing(uint32_t tiles, uint32_t barriers) : tiles(tiles), barriers(barriers) {}
  __device__ uint32_t tile() const { return tiles + stage * kStageBytes; }
  __device__ uint32_t full() const { return barriers + stage * 8; }
  __device__ uint32_t empty() const { return barriers + (kStages + stage) * 8; }
  __device__ void advance() {
    if (++stage == kStages) stage = 0, round ^= 1;
  }
};

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  LORAKERNELS_CHECK_CUDA(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
#else
  LORAKERNELS_CHECK_CUDA(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(function);
}

// A row-major matrix without gaps, copied in boxes whose rows are 128 bytes, swizzled as SwizzledRows<128> (wgmma.h).
// element_bytes cols: a multiple of 16. Without elements there is nothing to describe.
inline CUtensorMap tensor_map(const void* data, CUtensorMapDataType type, int element_bytes, int64_t rows, int64_t cols,
                              int box_rows) {
  static const EncodeTiled encode = encode_tiled();
  CUtensorMap map{};
  if (rows == 0 || cols == 0) return map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {element_bytes * sizes[0]};
  const cuuint32_t box[2] = {128u / element_bytes, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult code =
      encode(&map, type, 2, const_cast<void*>(data), sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(code));
  return map;
}

}  // namespace lorakernels
